"""nnU-Net's fingerprint of the cases of all sites, merged by the server of a FLARE job."""

from pathlib import Path

from ..config.study import Study
from ..config.yaml_files import read_yaml
from ..core.errors import ConfigError
from ..core.observer import SILENT, Observer
from ..tasks.nnunet.fingerprint import Fingerprint, count_samples
from .describe import run_statistics_job


def collect_fingerprints(
    config: Path, out: Path, *, total: int, kit: Path | None = None, observer: Observer = SILENT
) -> tuple[Fingerprint, list[str]]:
    """Let every site compute its fingerprint, and return that of all cases together, with the names of the sites.

    Args:
        config: file of the study, whose task is ``nnunet``; the plan that it names need not be there yet.
        out: folder of FLARE's log; created if missing.
        total: cases of all sites together, as far as known: nnU-Net draws as many samples of each case.
        kit: startup kit of an admin, for a running federation whose sites read their own data; None: FLARE's simulator.
        observer: hears how the sites' data is prepared, and of the job's progress.

    Raises:
        ConfigError: the task is another one.
        JobFailed: only one site is connected, a site keeps its fingerprint or cannot read its data, or the fingerprints
            do not fit each other.
    """
    task = read_yaml(config).get("task")
    if (name := task.get("name") if isinstance(task, dict) else task) != "nnunet":
        raise ConfigError(f"{config}: task is {name}; a plan needs task: {{name: nnunet}}")
    study = Study.load(config, ["task.plan=null"])
    from ..flare.fingerprints import RESULT, FingerprintRecipe

    recipe = FingerprintRecipe(study.config.job, count_samples(total))
    content = run_statistics_job(study, recipe, RESULT, out, kit, observer)
    found = Fingerprint.model_validate(content["fingerprint"])
    if found.cases != total:
        observer.warn(
            f"the sites have {found.cases} cases, --total is {total}: for the plan of the pooled data run again with "
            f"--total {found.cases}"
        )
    return found, content["sites"]
