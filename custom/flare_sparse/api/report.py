"""Reports of one or several runs: a page with figures, or their figures alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.checkpoint.writing import write_json
from ..core.errors import FlareSparseError, require_extra
from ..core.observer import SILENT, Observer
from ..core.seeds import limit_threads
from ..results.runs.comparison import describe_runs
from ..results.runs.cost import BATCH, load_inputs, measure_cost
from ..results.runs.load import load_study, load_trained_model
from ..results.runs.predictions import PREDICTIONS_FILE, CasePicture, compute_pictures, compute_predictions
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
        baselines: compare with trivial baselines, if the sites' data is on this machine; False: nothing that an earlier
            report computed from single subjects is shown either.
        pictures: show some cases of every site, of a segmentation whose data is on this machine.
        observer: hears which run has no baselines, and why.

    Returns:
        The files written.

    Raises:
        ConfigError: the extra report is not installed, or a folder holds no finished run.
    """
    with require_extra("report", "report"):
        from ..results.report.card import write_card
        from ..results.report.page import write_report
    with name_damage(runs[0]):
        results, notes = read_with_predictions(runs, baselines=baselines, observer=observer)
        results = [_measure(run, observer, pictures=pictures and run is results[0]) for run in results]
        for label, note in notes.items():
            observer.say(f"{label}: no baselines: {note}")
        return [*write_report(results, out or runs[0] / "report", pictures=pictures), *map(write_card, results)]


def compare_runs(runs: Sequence[Path], *, baselines: bool = True, observer: Observer = SILENT) -> dict[str, Any]:
    """Return metrics, baselines and paired differences of runs, as ``flare-sparse report --json`` prints them."""
    results, notes = read_with_predictions(runs, baselines=baselines, observer=observer)
    with name_damage(runs[0], OSError):
        return describe_runs(results, notes)


def read_with_predictions(
    runs: Sequence[Path], *, baselines: bool, observer: Observer
) -> tuple[list[RunResult], dict[str, str]]:
    """Return the runs with their predictions, and by label why a run has none."""
    results = read_runs(list(runs))
    notes = {run.label: note for run in results if baselines and (note := ensure_predictions(run, observer))}
    # Copies: a run above keeps what it has read of its folder, which had no predictions.
    return [replace(run, is_plain=not baselines) for run in results], notes


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


def _measure(run: RunResult, observer: Observer, *, pictures: bool) -> RunResult:
    """Return a run that has predictions with the cost of one, which is measured once, and with pictures of cases."""
    measures = not run.cost and not run.personal_model
    # Loading the study may ask to trust the run's code: not without a need.
    if run.predictions is None or not (pictures or measures):
        return run
    cases: list[CasePicture] = []
    try:
        study = load_study(run.path)
        pictures = pictures and type(study.assembly.task).illustrate is not Task.illustrate
        with limit_threads(study.config.torch_threads):
            sites = study.prepare_sites(run.path, observer) if pictures or measures else {}
            if pictures:
                cases = compute_pictures(run.path, study.assembly, sites, run.predictions)
            if measures:
                inputs = load_inputs(study, next(iter(sites.values())), BATCH)
                cost = {"identity": run.identity, **measure_cost(load_trained_model(study), inputs)}
                write_json(run.path / EVALUATIONS / COST_FILE, cost)
    except FlareSparseError as error:
        observer.say(f"{run.label}: without the cost of a prediction, or pictures of cases: {error}")
    # A copy: the run above keeps what it has read of its folder, which had no cost.
    return replace(run, pictures=cases)
