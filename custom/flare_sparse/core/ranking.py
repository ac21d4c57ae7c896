"""How well predicted risks rank two classes and how far they are right; survival as it was observed.

MONAI has both metrics, but importing it takes a process several seconds, and a task over a table needs nothing else of
it.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BINS = 10
"""Bins of equal width in which predicted risks are compared with what happened."""
Statistic = Callable[[np.ndarray], np.ndarray]
"""Values ``(r,)`` of a metric for weights ``(r, n)`` of the examples or subjects; NaN where it is undefined."""


def compute_auc(risk: Tensor, classes: Tensor) -> float:
    """Return the area under the ROC curve; equal risks count half.

    Args:
        risk: predicted risk of class 1, ``(n,)``.
        classes: 0 or 1, ``(n,)``; both occur.
    """
    compute = build_auc(risk.detach().cpu().numpy(), classes.detach().cpu().numpy()[:, None])
    return float(compute(np.ones((1, len(risk))))[0])


def build_auc(risk: np.ndarray, targets: np.ndarray) -> Statistic:
    """Return the area under the ROC curve as a function of weights; equal risks count half.

    Args:
        risk: predicted risk ``(n,)``.
        targets: classes 0 and 1, ``(n, 1)``.
    """
    order = np.argsort(risk, kind="stable")
    ranked, positive = risk[order], targets[order, 0] > 0.5
    start, end = np.searchsorted(ranked, ranked, "left"), np.searchsorted(ranked, ranked, "right")

    def compute(weights: np.ndarray) -> np.ndarray:
        sorted_weights = weights[:, order].astype(np.float64)
        below = np.zeros((len(weights), len(risk) + 1))
        np.cumsum(np.where(positive, 0.0, sorted_weights), axis=1, out=below[:, 1:])
        # The controls with a lower risk, and half of those with the same.
        ahead = (below[:, start] + below[:, end]) / 2
        pairs = sorted_weights[:, positive].sum(axis=1) * below[:, -1]
        won = (ahead * sorted_weights)[:, positive].sum(axis=1)
        return np.asarray(won / np.where(pairs, pairs, np.nan))

    return compute


def compute_average_precision(risk: Tensor, classes: Tensor) -> float:
    """Return the mean over the examples of class 1 of the precision at their risk.

    Args:
        risk: predicted risk of class 1, ``(n,)``.
        classes: 0 or 1, ``(n,)``; 1 occurs.
    """
    hits, called = _count_called(risk, classes)
    gained = np.diff(hits, prepend=0)
    return float((gained * (hits / called)).sum() / hits[-1])


def find_curve(risk: Tensor, classes: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the ROC curve: the shares of class 0 and of class 1 at or above each risk, from (0, 0) to (1, 1).

    Args:
        risk: predicted risk of class 1, ``(n,)``.
        classes: 0 or 1, ``(n,)``; both occur.

    >>> [share.tolist() for share in find_curve(torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([1, 1, 0, 0]))]
    [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    hits, called = (np.append(0, counts) for counts in _count_called(risk, classes))
    alarms = called - hits
    return alarms / alarms[-1], hits / hits[-1]


def _count_called(risk: Tensor, classes: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return how many examples of class 1, and how many of both, are at or above each risk, from the highest down."""
    values, positive = risk.detach().cpu().numpy(), classes.detach().cpu().numpy() > 0.5
    order = np.argsort(-values, kind="stable")
    ranked, hits = values[order], np.cumsum(positive[order])
    # The last example of each risk: a threshold takes in all equal risks.
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    return hits[last], last + 1


def bin_risks(risk: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return number, mean risk and share of class 1 in the bins of ``calibration_error`` that are not empty.

    Args:
        risk: predicted probability of class 1, ``(n,)``.
        classes: true class, 0 or 1, ``(n,)``.
    """
    bins = find_bins(risk)
    counts = torch.bincount(bins, minlength=BINS)
    sums = (torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, part.double()) for part in (risk, classes))
    kept = counts > 0
    mean_risk, share = (values[kept] / counts[kept] for values in sums)
    return counts[kept], mean_risk, share


def find_bins(risk: Tensor) -> Tensor:
    """Return the number ``(n,)`` of the bin of each risk between 0 and 1."""
    return (risk * BINS).long().clamp(0, BINS - 1)


def estimate_survival(times: Tensor, events: Tensor, at: Tensor, *, of_censoring: bool = False) -> Tensor:
    """Return the share ``(T,)`` without an event until the times ``at`` (Kaplan and Meier 1958), in float64.

    Args:
        times: ``(n,)``.
        events: ``(n,)`` 1 for an event, 0 for the end of the observation.
        at: ``(T,)``.
        of_censoring: return the share whose observation has not ended. A subject with an event is not at risk of an
            end at the same time.
    """
    moments = times.unique()
    at_moment = times == moments[:, None]
    happened = (at_moment & (events > 0.5)).sum(dim=1)
    at_risk = (times >= moments[:, None]).sum(dim=1)
    if of_censoring:
        happened, at_risk = at_moment.sum(dim=1) - happened, at_risk - happened
    kept = 1 - happened.double() / at_risk.clamp(min=1)
    return torch.where(moments <= at[:, None], kept, 1.0).prod(dim=1)
