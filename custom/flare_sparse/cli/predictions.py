"""Predictions of finished runs for their test subjects, where the data of all sites is on this machine."""

from __future__ import annotations

from ..core.errors import FlareSparseError
from ..core.seeds import limit_threads
from ..results.runs.load import load_assembly
from ..results.runs.pictures import PICTURES_FILE, compute_pictures, read_pictures, write_pictures
from ..results.runs.predictions import PREDICTIONS_FILE, compute_predictions
from ..results.runs.results import EVALUATIONS, RunResult
from ..tasks.task import Task
from .sites import prepare_site_data


def ensure_predictions(run: RunResult) -> str:
    """Compute the predictions of a run and of its baselines, unless its folder has them.

    Returns:
        Why the folder has none; empty if it has.
    """
    if run.predictions is not None and not run.predictions.note:
        return ""
    try:
        assembly, config = load_assembly(run.path)
        if config.simulator is None:
            return "the data of the sites is not on this machine; a deployed site sends metrics only"
        with limit_threads(config.torch_threads):
            sites = prepare_site_data(config, assembly.task, run.path)
            recorded = run.summary["final"]["sites"]
            predictions = compute_predictions(run.path, assembly, sites, recorded, run.identity)
    except FlareSparseError as error:
        return str(error)
    predictions.write(run.path / EVALUATIONS / PREDICTIONS_FILE)
    return ""


def ensure_pictures(run: RunResult) -> None:
    """Draw the best, the median and the worst test case of every site, unless the run's folder has these pictures.

    Only for a run with predictions whose task has something to see.
    """
    file = run.path / EVALUATIONS / PICTURES_FILE
    if run.predictions is None or read_pictures(file, run.identity) is not None:
        return
    assembly, config = load_assembly(run.path)
    if type(assembly.task).illustrate is Task.illustrate:
        return
    with limit_threads(config.federation.threads):
        sites = prepare_site_data(config, assembly.task, run.path)
        write_pictures(file, compute_pictures(run.path, assembly, sites, run.predictions), run.identity)
