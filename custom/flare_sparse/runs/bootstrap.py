"""Paired bootstrap: by how much two predictors differ on the same test subjects.

Efron and Tibshirani (1993), An Introduction to the Bootstrap, section 13.3. Subjects are drawn with replacement within
their site, so that every resample has the sites of the run, and both predictors are evaluated on the same subjects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..task import Kind

RESAMPLES = 10_000
LEVEL = 0.95
_CHUNK = 500


@dataclass(frozen=True)
class PairedMetric:
    """A metric of predictors on subjects.

    Attributes:
        name: name of the metric.
        is_lower_better: whether a lower value is better.
        score: per-subject scores ``(n,)`` of predictions and targets, of which the metric is the mean; None: the metric
            compares pairs of subjects.
    """

    name: str
    is_lower_better: bool
    score: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None


def _compute_absolute_error(predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(predictions - targets).mean(axis=1))


def _compute_hits(predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    classes = predictions[:, 0] > 0.5 if predictions.shape[1] == 1 else predictions.argmax(axis=1)
    return np.asarray(classes.astype(float) == targets[:, 0], dtype=np.float64)


MAE = PairedMetric("mae", is_lower_better=True, score=_compute_absolute_error)
ACCURACY = PairedMetric("accuracy", is_lower_better=False, score=_compute_hits)
AUC = PairedMetric("auc", is_lower_better=False)
C_INDEX = PairedMetric("c_index", is_lower_better=False)
METRICS: dict[Kind, tuple[PairedMetric, ...]] = {
    "regression": (MAE,),
    "binary": (ACCURACY, AUC),
    "classes": (ACCURACY,),
    "survival": (C_INDEX,),
}
"""Metrics that predictors are compared by, by the kind of the targets."""


@dataclass(frozen=True)
class Difference:
    """Metric of the first predictor minus that of the second, over all subjects and by site.

    Attributes:
        first: metric of the first predictor.
        second: metric of the second predictor.
        value: their difference.
        low: lower bound of the 95 % interval.
        high: upper bound.
        verdict: ``"ahead"`` if the first is better and the interval excludes 0, ``"behind"`` if it is worse and the
            interval excludes 0, else ``"undecided"``.
        by_site: difference at each site; sites where the metric is undefined are left out.
        sites_that_gain: share of these sites where the first is better.
        worst_site: the site where the first is worst compared with the second.
    """

    first: float
    second: float
    value: float
    low: float
    high: float
    verdict: str
    by_site: dict[str, float] = field(default_factory=dict)
    sites_that_gain: float | None = None
    worst_site: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


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
    change = first - second
    drawn = np.concatenate([counts @ change for counts in _iterate_resamples(sites, resamples)])
    by_site = {str(site): float(change[sites == site].mean()) for site in np.unique(sites)}
    means = float(first.mean()), float(second.mean())
    return _conclude(*means, drawn / len(change), by_site, is_lower_better=is_lower_better)


def compare_pairs(
    first: np.ndarray,
    second: np.ndarray,
    comparable: np.ndarray,
    sites: np.ndarray,
    resamples: int = RESAMPLES,
) -> Difference | None:
    """Compare two predictors by the share of ordered pairs of subjects that they rank correctly; a tie counts half.

    That is the AUC if a pair is one of a case and a control, and the C-index if the first of the pair is known to have
    the event before the second. Pairs reach across sites.

    Args:
        first: predicted risk ``(n,)`` of the first predictor.
        second: predicted risk ``(n,)`` of the second predictor.
        comparable: bool ``(n, n)``: the risk of the row's subject should be above that of the column's.
        sites: ``(n,)`` site of each subject.
        resamples: number of resamples.

    Returns:
        None if no pair is comparable.
    """
    if not comparable.any():
        return None
    weights = comparable.astype(np.float32)
    ranked = [_rank_pairs(risk) * weights for risk in (first, second)]
    change = ranked[0] - ranked[1]
    values = []
    for counts in _iterate_resamples(sites, resamples):
        drawn = counts.astype(np.float32)
        total = ((drawn @ weights) * drawn).sum(axis=1)
        # A resample without any comparable pair has no value.
        values.append((((drawn @ change) * drawn).sum(axis=1) / np.where(total, total, np.nan)).astype(np.float64))
    resampled = np.concatenate(values)
    count = float(weights.sum())
    means = [float(part.sum() / count) for part in ranked]
    by_site = {}
    for site in np.unique(sites):
        rows = np.ix_(sites == site, sites == site)
        if pairs := float(weights[rows].sum()):
            by_site[str(site)] = float(change[rows].sum() / pairs)
    return _conclude(means[0], means[1], resampled[np.isfinite(resampled)], by_site, is_lower_better=False)


def find_comparable_pairs(kind: Kind, targets: np.ndarray) -> np.ndarray:
    """Return the pairs ``(n, n)`` of which the first subject should have the higher predicted risk.

    Args:
        kind: ``"binary"``: a case and a control; ``"survival"``: the first has its event at an earlier time than the
            second has its event or is last seen (Harrell's C).
        targets: ``(n, 1)`` classes, or ``(n, 2)`` times and events.
    """
    if kind == "binary":
        positive = targets[:, 0] > 0.5
        return np.asarray(positive[:, None] & ~positive[None, :])
    times, events = targets[:, 0], targets[:, 1] > 0.5
    return np.asarray(events[:, None] & (times[:, None] < times[None, :]))


def compare_predictors(
    kind: Kind, metric: PairedMetric, first: np.ndarray, second: np.ndarray, targets: np.ndarray, sites: np.ndarray
) -> Difference | None:
    """Compare two predictors ``(n, k)`` on the same subjects by a metric; None if it is undefined."""
    if metric.score is not None:
        scores = metric.score(first, targets), metric.score(second, targets)
        return compare_scores(*scores, sites, is_lower_better=metric.is_lower_better)
    return compare_pairs(first[:, -1], second[:, -1], find_comparable_pairs(kind, targets), sites)


def compute_r2_within_sites(predictions: np.ndarray, targets: np.ndarray, sites: np.ndarray) -> float | None:
    """Return 1 minus the squared errors divided by the squared distances from each site's own mean.

    The mean of a site's test subjects scores 0, so differences between sites earn nothing. None if no site varies.
    """
    means = {site: targets[sites == site].mean() for site in np.unique(sites)}
    spread = targets[:, 0] - np.array([means[site] for site in sites])
    total = float((spread**2).sum())
    return 1 - float(((predictions[:, 0] - targets[:, 0]) ** 2).sum()) / total if total else None


def _rank_pairs(risk: np.ndarray) -> np.ndarray:
    """Return 1 where the row's risk is above the column's, 0.5 where they are equal, else 0."""
    gap = risk[:, None] - risk[None, :]
    return np.asarray((gap > 0) + 0.5 * (gap == 0), dtype=np.float32)


def _iterate_resamples(sites: np.ndarray, resamples: int) -> Iterator[np.ndarray]:
    """Yield how often each subject is drawn, ``(chunk, n)``: each site's subjects as often as it has subjects.

    The numbers depend on the sites alone, so all comparisons on the same subjects draw the same resamples.
    """
    generator, members = np.random.default_rng(0), [np.flatnonzero(sites == site) for site in np.unique(sites)]
    for start in range(0, resamples, _CHUNK):
        counts = np.zeros((min(_CHUNK, resamples - start), len(sites)), dtype=np.int64)
        for rows in members:
            counts[:, rows] = generator.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=len(counts))
        yield counts


def _conclude(
    first: float, second: float, drawn: np.ndarray, by_site: dict[str, float], *, is_lower_better: bool
) -> Difference:
    low, high = (float(bound) for bound in np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    # Positive: the first is better.
    sign = -1 if is_lower_better else 1
    better = sorted((sign * low, sign * high))
    verdict = "ahead" if better[0] > 0 else "behind" if better[1] < 0 else "undecided"
    gains = {site: sign * value for site, value in by_site.items()}
    share = sum(gain > 0 for gain in gains.values()) / len(gains) if gains else None
    worst = min(gains, key=lambda site: gains[site]) if gains else ""
    return Difference(first, second, first - second, low, high, verdict, by_site, share, worst)
