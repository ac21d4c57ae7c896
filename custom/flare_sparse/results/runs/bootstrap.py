"""Paired bootstrap: by how much two predictors differ on the same test subjects.

Efron and Tibshirani (1993), An Introduction to the Bootstrap, section 13.3. Subjects are drawn with replacement within
their site, so that every resample has the sites of the run, and both predictors are evaluated on the same subjects.
Drawing all n subjects of a site underestimates its variance by the factor (n - 1) / n, half for a site of two. A
resample therefore draws n - 1 of them, each with the weight n / (n - 1), which is unbiased for means: Rao and Wu
(1988), J. Am. Stat. Assoc. 83:231, section 2.

A variance from few subjects is itself uncertain, which quantiles of resamples leave out: their intervals are too short.
Each is therefore stretched by the ratio of the quantiles of Student's t and of the normal distribution, with as many
degrees of freedom as there are subjects less strata, as the interval of a stratified mean is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ...core.ranking import Statistic, build_auc
from ...tasks.task import Kind

RESAMPLES = 10_000
LEVEL = 0.95
_NORMAL = 1.959964
"""Quantile of the normal distribution at the upper bound of this level."""
_CHUNK = 500
LEAST_FREEDOM = 5
"""Fewest degrees of freedom that decide a difference, six subjects of one site: with five, all of them agree by chance
in 2 of 32 cases."""
LEAST_DEFINED = 0.95
"""Least share of the resamples in which a metric must be defined."""
MOST_PAIRED = 6000
"""Most examples that a C-index is compared on."""
LEAST_PAIRED = 4
"""Fewest subjects of a site whose pairs are compared within it: of fewer, the interval would be too narrow."""


@dataclass(frozen=True)
class PairedMetric:
    """A metric of predictors on subjects.

    Attributes:
        name: name of the metric.
        is_lower_better: whether a lower value is better.
        score: scores ``(n,)`` of examples by their predictions and targets: those of which the metric is the mean, or
            the risks by which it ranks them.
        ranks: what the metric ranks: examples of two classes (AUC), times (C-index), or nothing: then it is the mean
            over subjects of the mean score of their examples. The risks of two runs have no common zero, as
            log-hazards, so that a mean of them ranks no times; the scores of several runs are then ``(n, r)``, NaN
            where a run did not test an example.
        is_within_sites: whether it ranks the examples of each site alone. Resamples then use the metric linearised at
            equal weights. Where sites are small, pairs within sites vary up to 1.7 times as much in resamples as in
            new data; their linearised mean does not.
    """

    name: str
    is_lower_better: bool
    score: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ranks: Literal["", "classes", "times"] = ""
    is_within_sites: bool = False


def _compute_absolute_error(predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(predictions - targets).mean(axis=1))


def _compute_hits(predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    classes = predictions[:, 0] > 0.5 if predictions.shape[1] == 1 else predictions.argmax(axis=1)
    return np.asarray(classes.astype(float) == targets[:, 0], dtype=np.float64)


@dataclass(frozen=True)
class Difference:
    """Metric of the first predictor minus that of the second, over all subjects and by site.

    Attributes:
        first: metric of the first predictor.
        second: metric of the second predictor.
        value: their difference.
        low: lower bound of the 95 % interval, stretched for few subjects.
        high: upper bound.
        verdict: ``"ahead"`` if the first is better and the interval excludes 0, ``"behind"`` if it is worse and the
            interval excludes 0, else ``"undecided"``; few subjects decide nothing.
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


def compare_predictors(
    metric: PairedMetric,
    first: np.ndarray,
    second: np.ndarray,
    targets: np.ndarray,
    sites: np.ndarray,
    subjects: np.ndarray,
    resamples: int = RESAMPLES,
) -> Difference | None:
    """Compare two predictors on the same examples by a metric; None if it is undefined there or in many resamples.

    AUC and C-index compare pairs of examples, across sites too, unless the metric is one within sites. A C-index of
    more than 6,000 examples has no interval here, because it compares all pairs in every resample.

    Args:
        metric: the metric.
        first: scores ``(n,)`` or ``(n, r)`` of the first predictor's examples, see :class:`PairedMetric`.
        second: those of the second predictor.
        targets: ``(n, t)``.
        sites: ``(n,)`` site of each example.
        subjects: ``(n,)`` number of each example's subject, from 0; the examples of a subject are drawn together.
        resamples: number of resamples.
    """
    examples = _select_examples(metric, sites, subjects, first, second, targets)
    if examples is None:
        return None
    sites, subjects, first, second, targets = examples
    own, other = (build_statistic(metric, scores, targets, sites, subjects) for scores in (first, second))
    groups = _form_groups(metric, sites, subjects)
    sites = sites[np.unique(subjects, return_index=True)[1]]
    everyone = np.ones((1, len(sites)), dtype=np.int64)
    means = float(own(everyone)[0]), float(other(everyone)[0])
    if not all(map(np.isfinite, means)):
        return None
    strata = _form_strata(sites)
    sizes = np.bincount(strata)[strata]
    scale = sizes / np.maximum(sizes - 1, 1)
    resampled = (scale * counts for counts in iterate_resamples(strata, resamples, left_out=1))
    if not metric.is_within_sites:
        drawn = np.concatenate([_subtract(own(weights), other(weights)) for weights in resampled])
    else:
        by_example = (compute_c_index_influences(scores, targets, groups) for scores in (first, second))
        own_influences, other_influences = (np.bincount(subjects, values) for values in by_example)
        influences = own_influences - other_influences
        drawn = means[0] - means[1] + np.concatenate([(weights - 1) @ influences for weights in resampled])
    # A resample of one class has no AUC.
    if np.isfinite(drawn).mean() < LEAST_DEFINED:
        return None
    freedom = len(sites) - len(np.unique(strata))
    bounds = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    stretch = compute_t_quantile(_NORMAL, max(freedom, 1)) / _NORMAL
    low, high = (means[0] - means[1] + stretch * (bounds - (means[0] - means[1]))).tolist()
    names = np.unique(sites)
    members = (sites[None, :] == names[:, None]).astype(np.int64)
    by_site = {
        str(site): float(value)
        for site, value in zip(names, own(members) - other(members), strict=True)
        if np.isfinite(value)
    }
    # Positive: the first is better.
    sign = -1 if metric.is_lower_better else 1
    better = sorted((sign * low, sign * high))
    verdict = "ahead" if better[0] > 0 else "behind" if better[1] < 0 else "undecided"
    if freedom < LEAST_FREEDOM:
        verdict = "undecided"
    gains = {site: sign * value for site, value in by_site.items()}
    share = sum(gain > 0 for gain in gains.values()) / len(gains) if gains else None
    worst = min(gains, key=lambda site: gains[site]) if gains else ""
    return Difference(*means, means[0] - means[1], low, high, verdict, by_site, share, worst)


def evaluate_metric(
    metric: PairedMetric, scores: np.ndarray, targets: np.ndarray, sites: np.ndarray, subjects: np.ndarray
) -> float | None:
    """Return a metric of one predictor's scored examples; None if it is undefined, or compares too many pairs.

    The arguments are those of :func:`compare_predictors`.
    """
    examples = _select_examples(metric, sites, subjects, scores, targets)
    if examples is None:
        return None
    sites, subjects, scores, targets = examples
    statistic = build_statistic(metric, scores, targets, sites, subjects)
    value = float(statistic(np.ones((1, subjects.max() + 1), dtype=np.int64))[0])
    return value if np.isfinite(value) else None


def _select_examples(
    metric: PairedMetric, sites: np.ndarray, subjects: np.ndarray, *parts: np.ndarray
) -> tuple[np.ndarray, ...] | None:
    """Return sites, subjects, numbered anew, and other parts of the examples that a metric compares; None: none."""
    kept = _form_groups(metric, sites, subjects) >= 0
    if is_too_large(metric, len(sites)) or not kept.any():
        return None
    return sites[kept], np.unique(subjects[kept], return_inverse=True)[1], *(part[kept] for part in parts)


def is_too_large(metric: PairedMetric, examples: int) -> bool:
    """Return whether a metric compares too many pairs of examples for resamples of all of them."""
    return metric.ranks == "times" and examples > MOST_PAIRED


def build_statistic(
    metric: PairedMetric, scores: np.ndarray, targets: np.ndarray, sites: np.ndarray, subjects: np.ndarray
) -> Statistic:
    """Return a metric of scored examples as a function of the weights of their subjects."""
    if not metric.ranks:
        means = np.bincount(subjects, scores) / np.bincount(subjects)
        return lambda weights: np.asarray(weights @ means / weights.sum(axis=1))
    groups = _form_groups(metric, sites, subjects)
    statistic = build_auc(scores, targets) if metric.ranks == "classes" else build_c_index(scores, targets, groups)
    return lambda weights: statistic(weights[:, subjects])


def _form_groups(metric: PairedMetric, sites: np.ndarray, subjects: np.ndarray) -> np.ndarray:
    """Return the group ``(n,)`` of each example: 0, or for a metric within sites the number of its site.

    The number is -1 at the sites with fewer than ``LEAST_PAIRED`` subjects.
    """
    if not metric.is_within_sites:
        return np.zeros(len(sites), dtype=np.int64)
    _, first_examples, subject_of_example = np.unique(subjects, return_index=True, return_inverse=True)
    _, site_of_subject, num_subjects = np.unique(sites[first_examples], return_inverse=True, return_counts=True)
    group_of_site = np.where(num_subjects < LEAST_PAIRED, -1, np.arange(len(num_subjects)))
    group_of_subject = group_of_site[site_of_subject]
    return np.asarray(group_of_subject[subject_of_example])


def build_c_index(risk: np.ndarray, targets: np.ndarray, groups: np.ndarray) -> Statistic:
    """Return Harrell's C-index as a function of weights; equal risks count half.

    Args:
        risk: predicted risk ``(n,)``, or ``(n, r)`` of several runs, NaN where a run did not test an example: each run
            ranks its own examples, and the pairs of all runs count alike.
        targets: times and events, ``(n, 2)``.
        groups: ``(n,)``; pairs of one group are compared, those of a negative one never.
    """
    comparable, concordant = _count_pairs(risk, targets, groups)

    def compute(weights: np.ndarray) -> np.ndarray:
        drawn = weights.astype(np.float32)
        pairs, won = (((drawn @ matrix) * drawn).sum(axis=1, dtype=np.float64) for matrix in (comparable, concordant))
        return np.asarray(won / np.where(pairs, pairs, np.nan))

    return compute


def compute_c_index_influences(risk: np.ndarray, targets: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the derivatives ``(n,)`` of the C-index by the weight of each example, at equal weights.

    See :func:`build_c_index` for the arguments.
    """
    matrices = _count_pairs(risk, targets, groups)
    pairs, won = (matrix.sum(axis=0, dtype=np.float64) + matrix.sum(axis=1, dtype=np.float64) for matrix in matrices)
    total = pairs.sum() / 2
    c_index = won.sum() / 2 / total if total else np.nan
    return np.asarray((won - c_index * pairs) / (total or np.nan))


def _count_pairs(risk: np.ndarray, targets: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many runs compare the pairs ``(n, n)`` of an event and a later time, and how many rank them right."""
    times, events = targets[:, 0], targets[:, 1] > 0.5
    # A subject who is censored at the time of another one's event survived that event.
    later = (times[None, :] > times[:, None]) | ((times[None, :] == times[:, None]) & ~events[None, :])
    earlier = events[:, None] & later & (groups[:, None] == groups[None, :]) & (groups >= 0)[:, None]
    comparable, concordant = np.zeros((2, *earlier.shape), dtype=np.float32)
    for own in risk.reshape(len(risk), -1).T:
        tested = np.flatnonzero(~np.isnan(own))
        block = np.ix_(tested, tested)
        gap = own[tested, None] - own[None, tested]
        comparable[block] += earlier[block]
        concordant[block] += earlier[block] * ((gap > 0) + 0.5 * (gap == 0))
    return comparable, concordant


def _get_risk(predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:  # noqa: ARG001
    return predictions[:, -1]


MAE = PairedMetric("mae", is_lower_better=True, score=_compute_absolute_error)
ACCURACY = PairedMetric("accuracy", is_lower_better=False, score=_compute_hits)
# A task's own auc and c_index are means of rankings within sites: these rank the subjects of all sites together.
AUC = PairedMetric("auc_across_sites", is_lower_better=False, score=_get_risk, ranks="classes")
C_INDEX = PairedMetric("c_index_across_sites", is_lower_better=False, score=_get_risk, ranks="times")
C_INDEX_WITHIN_SITES = replace(C_INDEX, name="c_index_within_sites", is_within_sites=True)
METRICS: dict[Kind, tuple[PairedMetric, ...]] = {
    "regression": (MAE,),
    "binary": (ACCURACY, AUC),
    "classes": (ACCURACY,),
    "survival": (C_INDEX,),
}
"""Metrics that predictors are compared by, by the kind of the targets."""


def select_metrics(kind: Kind | None, *, has_site_models: bool) -> tuple[PairedMetric, ...]:
    """Return the metrics that two predictors are compared by.

    Args:
        kind: kind of the targets; None: unknown, so that there are none.
        has_site_models: whether one of them is another model at each site. The log-hazards of two models have no common
            zero, so pairs of subjects of two sites mean nothing to it.
    """
    if kind == "survival" and has_site_models:
        return (C_INDEX_WITHIN_SITES,)
    return METRICS[kind] if kind else ()


def compute_t_quantile(z: float, freedom: int) -> float:
    """Return the quantile of Student's t at which the normal one is ``z``.

    Abramowitz and Stegun (1964), equation 26.7.5; from three degrees of freedom on the error is below 0.1 %.

    >>> [round(compute_t_quantile(1.959964, freedom), 2) for freedom in (3, 5, 9, 100)]
    [3.18, 2.57, 2.26, 1.98]
    """
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))


def compute_r2_within_sites(predictions: np.ndarray, targets: np.ndarray, sites: np.ndarray) -> float | None:
    """Return 1 minus the squared errors divided by the squared distances from each site's own mean.

    The mean of a site's test subjects scores 0, so differences between sites earn nothing. None if no site varies.
    """
    means = {site: targets[sites == site].mean() for site in np.unique(sites)}
    spread = targets[:, 0] - np.array([means[site] for site in sites])
    total = float((spread**2).sum())
    return 1 - float(((predictions[:, 0] - targets[:, 0]) ** 2).sum()) / total if total else None


def _subtract(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the difference of two statistics; 0 where fractional weights have rounded equal ones differently."""
    return np.where(np.isclose(first, second, rtol=1e-9, atol=0), 0.0, first - second)


def _form_strata(sites: np.ndarray) -> np.ndarray:
    """Return the number ``(n,)`` of the stratum that each subject is resampled in: its site.

    One subject alone has no variance, so the sites with a single subject form one stratum; an only such site joins the
    smallest other one.
    """
    _, strata, sizes = np.unique(sites, return_inverse=True, return_counts=True)
    joined = np.flatnonzero(sizes == 1)
    if len(joined) == 1:
        joined = np.argsort(sizes, kind="stable")[:2]
    if len(joined):
        strata[np.isin(strata, joined)] = joined[0]
    return strata


def iterate_resamples(groups: np.ndarray, resamples: int, left_out: int = 0) -> Iterator[np.ndarray]:
    """Yield how often each subject is drawn, ``(chunk, n)``, with replacement within its group.

    The numbers depend on the groups alone, so all comparisons on the same subjects draw the same resamples.

    Args:
        groups: ``(n,)`` group of each subject.
        resamples: number of resamples.
        left_out: by how many the draws from a group are fewer than its subjects. A single subject is always drawn.
    """
    generator, members = np.random.default_rng(0), [np.flatnonzero(groups == group) for group in np.unique(groups)]
    for start in range(0, resamples, _CHUNK):
        counts = np.zeros((min(_CHUNK, resamples - start), len(groups)), dtype=np.int64)
        for rows in members:
            drawn = generator.integers(len(rows), size=(len(counts), max(len(rows) - left_out, 1)))
            # One count for all resamples of the chunk: numbers of the subjects, shifted by resample.
            cells = (drawn + len(rows) * np.arange(len(counts))[:, None]).ravel()
            counts[:, rows] = np.bincount(cells, minlength=counts.shape[0] * len(rows)).reshape(len(counts), -1)
        yield counts
