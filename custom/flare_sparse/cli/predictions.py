"""Predictions of finished runs for their test subjects, where the data of all sites is on this machine."""

from __future__ import annotations

from ..errors import FlareSparseError
from ..runs.load import load_assembly
from ..runs.predictions import PREDICTIONS_FILE, compute_predictions
from ..runs.results import EVALUATIONS, RunResult
from ..seeds import limit_threads
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
