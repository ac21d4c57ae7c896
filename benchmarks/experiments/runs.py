"""Parts that the experiments share: configurations, which process writes a file, and paired comparisons."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.results.runs.bootstrap import RESAMPLES, Difference, PairedMetric, compare_predictors
from flare_sparse.tasks.task import Task
from flare_sparse.training import Site

CONFIGS = Path(__file__).resolve().parents[2] / "app_configs"


@contextmanager
def claim(file: Path) -> Iterator[bool]:
    """Yield whether this process is to write the file: it is missing and no other process writes it.

    The lock ends with its process, so that a killed run can start again.
    """
    with file.with_suffix(".claimed").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield not file.exists()


def write_once(file: Path, measure: Callable[[], Any]) -> bool:
    """Write what ``measure`` returns as JSON, unless the file is there or another process is at it; return whether."""
    with claim(file) as is_claimed:
        if is_claimed:
            write_json(file, measure())
    return is_claimed


def predict_at_site(task: Task, site: Site, examples: Dataset[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predictions and the first target of each example, by the model that a site has evaluated last."""
    assert site.evaluated is not None, "every site has evaluated its final model"
    layout, weights = site.evaluated
    model = task.model()
    # Buffers that no message carries keep what the task gives them.
    model.load_state_dict(layout.unflatten(weights), strict=False)
    predictions, targets = task.measure_all(model, examples)
    return predictions, targets.reshape(len(predictions), -1)[:, 0]


def compare_scores(
    first: np.ndarray, second: np.ndarray, sites: np.ndarray, *, is_lower_better: bool, resamples: int = RESAMPLES
) -> Difference:
    """Compare two predictors by the mean of a score per subject.

    Args:
        first: scores ``(n,)`` of the first predictor.
        second: scores ``(n,)`` of the second predictor on the same subjects.
        sites: ``(n,)`` site of each subject.
        is_lower_better: whether a lower score is better.
        resamples: number of resamples.
    """
    metric = PairedMetric("score", is_lower_better, lambda scores, _: scores[:, -1])
    examples = np.zeros((len(sites), 1)), sites, np.arange(len(sites))
    difference = compare_predictors(metric, first, second, *examples, resamples)
    assert difference is not None, "a mean is defined for every resample"
    return difference
