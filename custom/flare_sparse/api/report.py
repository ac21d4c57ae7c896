"""Reports of one or several runs: a page with figures, or their figures alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.checkpoint.writing import write_json
from ..core.errors import FlareSparseError, UntrustedCode, require_extra
from ..core.observer import SILENT, Observer
from ..core.seeds import limit_threads
from ..results.runs.comparison import describe_runs
from ..results.runs.cost import BATCH, load_inputs, measure_cost
from ..results.runs.load import load_study, load_trained_model
from ..results.runs.predictions import (
    PICTURES_FILE,
    PREDICTIONS_FILE,
    compute_pictures,
    compute_predictions,
    read_pictures,
    write_pictures,
)
from ..results.runs.received import name_damage
from ..results.runs.results import COST_FILE, EVALUATIONS, RunResult, read_runs
from ..tasks.task import Task


def write_reports(
    runs: Sequence[Path],
    out: Path | None = None,
    *,
    baselines: bool = True,
    pictures: bool = True,
    observer: Observer = SILENT,
) -> list[Path]:
    """Write figures, tables and a page of one or several runs, and their model cards.

    Args:
        runs: result folders of finished runs with the same metric.
        out: folder; None: ``report/`` in the first result folder.
        baselines: compare with trivial baselines, if the sites' data is on this machine.
        pictures: show some cases of every site, of a segmentation whose data is on this machine.
        observer: hears which run has no baselines, and why.

    Returns:
        The files written.

    Raises:
        ConfigError: the extra report is not installed, or a folder holds no finished run.
    """
    results, notes = read_with_predictions(runs, baselines=baselines, observer=observer)
    for run in results:
        ensure_cost(run, observer)
    # Read again, as for predictions.
    results = read_runs(list(runs))
    if pictures:
        for run in results:
            ensure_pictures(run, observer)
    with require_extra("report", "report"):
        from ..results.report.card import write_card
        from ..results.report.page import write_report
    for label, note in notes.items():
        observer.say(f"{label}: no baselines: {note}")
    folder = out or runs[0] / "report"
    return [*write_report(results, folder, pictures=pictures), *(write_card(run) for run in results)]


def compare_runs(runs: Sequence[Path], *, baselines: bool = True, observer: Observer = SILENT) -> dict[str, Any]:
    """Return metrics, baselines and paired differences of runs, as ``flare-sparse report --json`` prints them."""
    results, notes = read_with_predictions(runs, baselines=baselines, observer=observer)
    with name_damage(runs[0]):
        return describe_runs(results, notes)


def read_with_predictions(
    runs: Sequence[Path], *, baselines: bool, observer: Observer
) -> tuple[list[RunResult], dict[str, str]]:
    """Return the runs with their predictions, and by label why a run has none."""
    results = read_runs(list(runs))
    notes = {run.label: note for run in results if baselines and (note := ensure_predictions(run, observer))}
    # Read again: the predictions that were just written belong to the record.
    return read_runs(list(runs)), notes


def ensure_predictions(run: RunResult, observer: Observer = SILENT) -> str:
    """Compute the predictions of a run and of its baselines, unless its folder has them.

    Returns:
        Why the folder has none; empty if it has.
    """
    if run.predictions is not None and not run.predictions.note:
        return ""
    if "script" in run.config.get("task", {}):
        # Said before anybody is asked to trust the script: no code helps.
        return "a training script reads the data itself"
    try:
        study = load_study(run.path)
        if study.config.simulator is None:
            return "the data of the sites is not on this machine; a deployed site sends metrics only"
        with limit_threads(study.config.torch_threads):
            sites = study.prepare_sites(run.path, observer)
            recorded = run.summary["final"]["sites"]
            predictions = compute_predictions(run.path, study.assembly, sites, recorded, run.identity)
    except FlareSparseError as error:
        return str(error)
    predictions.write(run.path / EVALUATIONS / PREDICTIONS_FILE)
    return ""


def ensure_cost(run: RunResult, observer: Observer = SILENT) -> None:
    """Measure what a prediction costs, unless the run's folder says so; the sites' data must be on this machine."""
    if run.cost or run.predictions is None or run.personal_model:
        return
    try:
        study = load_study(run.path)
        with limit_threads(study.config.torch_threads):
            site = next(iter(study.prepare_sites(run.path, observer).values()))
            cost = measure_cost(load_trained_model(study), load_inputs(study, site, BATCH))
    except FlareSparseError as error:
        observer.say(f"{run.label}: the cost of a prediction is not measured: {error}")
        return
    write_json(run.path / EVALUATIONS / COST_FILE, {"identity": run.identity, **cost})


def ensure_pictures(run: RunResult, observer: Observer = SILENT) -> None:
    """Draw the best, the median and the worst test case of every site, unless the run's folder has these pictures.

    Only for a run with predictions whose task has something to see.
    """
    file = run.path / EVALUATIONS / PICTURES_FILE
    if run.predictions is None or read_pictures(file, run.identity) is not None:
        return
    try:
        study = load_study(run.path)
    except UntrustedCode as error:
        observer.note(str(error))
        return
    if type(study.assembly.task).illustrate is Task.illustrate:
        return
    with limit_threads(study.config.federation.threads):
        sites = study.prepare_sites(run.path, observer)
        write_pictures(file, compute_pictures(run.path, study.assembly, sites, run.predictions), run.identity)
