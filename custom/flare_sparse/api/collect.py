"""nnU-Net's fingerprint of the cases of all sites, merged by the server of a FLARE job."""

from __future__ import annotations

from pathlib import Path

from ..config.sites import prepare_site_data
from ..config.study import Study
from ..core.errors import ConfigError
from ..core.observer import SILENT, Observer
from ..tasks.data.source import write_site_files
from ..tasks.nnunet.fingerprint import SAMPLES, Fingerprint
from ..tasks.nnunet.task import NnunetConfig


def collect_fingerprints(
    study: Study, out: Path, *, total: int, kit: Path | None = None, observer: Observer = SILENT
) -> Fingerprint:
    """Let every site compute its fingerprint, and return that of all cases together.

    Args:
        study: the study, whose task is ``nnunet``; it needs no plan yet.
        out: folder of FLARE's log; created if missing.
        total: cases of all sites together, as far as known: nnU-Net draws as many samples of each case.
        kit: startup kit of an admin, for a running federation whose sites read their own data; None: FLARE's simulator.
        observer: hears how the sites' data is prepared, and of the job's progress.

    Raises:
        ConfigError: the task is another one.
        JobFailed: a site keeps its fingerprint or cannot read its data, or the fingerprints do not fit each other.
    """
    if not isinstance(study.config.task.config, NnunetConfig):
        raise ConfigError(f"task is {study.config.task.name}; collect needs task: {{name: nnunet}}")
    from ..flare.fingerprints import RESULT, FingerprintRecipe
    from ..flare.launch.simulator import simulate_statistics
    from ..flare.launch.submission import run_statistics

    out.mkdir(parents=True, exist_ok=True)
    recipe = FingerprintRecipe(study.config.job, max(SAMPLES // total, 1))
    if kit is None:
        sites = prepare_site_data(study.config, study.load_task(), out, observer)
        # Site files name identifiers of subjects, which belong to no result.
        site_files = write_site_files(out / "workspace" / "sites", sites.values())
        content = simulate_statistics(recipe, sorted(sites), site_files, out, RESULT, observer)
    else:
        content = run_statistics(recipe, kit.resolve(), out, RESULT, observer.say)
    return Fingerprint.model_validate(content)
