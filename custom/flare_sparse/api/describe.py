"""Figures of a study before it runs: statistics of the sites' columns, and nnU-Net's fingerprint of their cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.study import Study, prepare_site_data
from ..config.yaml_files import read_yaml
from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, require_extra
from ..core.observer import SILENT, Observer
from ..results.runs.description import find_warnings
from ..tasks.data.source import write_site_files
from ..tasks.nnunet.fingerprint import Fingerprint, count_samples
from ..tasks.table_config import TableConfig

if TYPE_CHECKING:
    from ..flare.recipe import QuestionRecipe

RECORD = "description.json"


def describe_study(
    study: Study, out: Path, *, least: int = 10, kit: Path | None = None, observer: Observer = SILENT
) -> dict[str, Any]:
    """Compute statistics of the sites' columns by a FLARE job, and write a page.

    Args:
        study: the study; its method does not matter.
        out: folder of the page, the record and FLARE's log; created if missing.
        least: fewest rows from which a figure is computed.
        kit: startup kit of an admin, for a running federation whose sites read their own data; None: FLARE's simulator.
        observer: hears how the sites' data is prepared, and of the job's progress.

    Returns:
        The record: name, sites, least, statistics by column and site, warnings.

    Raises:
        ConfigError: the extra report is not installed, or the task is code of the user, which no site would have.
        JobFailed: a site forbids statistics or cannot read its data.
    """
    if study.user_code:
        raise ConfigError(
            "describe reads data by a task of this package (table, brain_age, ...); with a task or a script of your "
            "own, name the table's columns in a configuration with task: {name: table, ...}"
        )
    with require_extra("describe", "report"):
        from ..results.report.describe import write_description
    from ..flare.questions import DescriptionController, StatisticsExecutor
    from ..flare.recipe import QuestionRecipe

    recipe = QuestionRecipe(study.config.job, StatisticsExecutor(least), DescriptionController)
    content = run_statistics_job(study, recipe, DescriptionController.result, out, kit, observer)
    settings = study.load_task().config
    expected = [*settings.features, settings.target] if isinstance(settings, TableConfig) else []
    record = build_record(study.config.name, least, content, expected)
    write_json(out / RECORD, record)
    write_description(record, out)
    return record


def run_statistics_job(
    study: Study, recipe: QuestionRecipe, result: str, out: Path, kit: Path | None, observer: Observer
) -> Any:
    """Run a job whose answers are statistics, which trains nothing, and return what its server wrote.

    Args:
        study: the study, whose simulated sites have the data if there is no kit.
        recipe: the job.
        result: path of the statistics in the server's folder of the job.
        out: folder of FLARE's log; created if missing.
        kit: as in :func:`describe_study`.
        observer: as in :func:`describe_study`.

    Raises:
        JobFailed: the job ended without statistics.
    """
    from ..flare.launch.simulator import Workplace, simulate_statistics
    from ..flare.launch.submission import run_statistics

    out.mkdir(parents=True, exist_ok=True)
    if kit is not None:
        return run_statistics(recipe, kit.resolve(), out, result, observer)
    sites = prepare_site_data(study.config, study.load_task(), out, observer)
    # Site files name identifiers of subjects, which belong to no result.
    site_files = write_site_files(out / "workspace" / "sites", sites.values())
    return simulate_statistics(recipe, Workplace(sorted(sites), site_files), out, result, observer)


def build_record(
    name: str, least: int, columns: Mapping[str, Mapping[str, Mapping[str, Any]]], expected: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the record of a description: its statistics by column and site, and what they warn of."""
    sites = sorted({site for by_site in columns.values() for site in by_site})
    return {
        "name": name,
        "sites": sites,
        "least": least,
        "columns": columns,
        "warnings": find_warnings(columns, sites, expected),
    }


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
    from ..flare.questions import FingerprintController, FingerprintExecutor
    from ..flare.recipe import QuestionRecipe

    recipe = QuestionRecipe(study.config.job, FingerprintExecutor(count_samples(total)), FingerprintController)
    content = run_statistics_job(study, recipe, FingerprintController.result, out, kit, observer)
    found = Fingerprint.model_validate(content["fingerprint"])
    if found.cases != total:
        observer.warn(
            f"the sites have {found.cases} cases, --total is {total}: for the plan of the pooled data run again with "
            f"--total {found.cases}"
        )
    return found, content["sites"]
