"""Final metrics by subgroup of the test subjects, over all sites, from what each site sent."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import hypot, inf, sqrt
from statistics import NormalDist

from ...cohorts.subgroups import ERROR, EVERYONE, SUBJECTS, make_plain, parse_subgroup, split_metric
from .bootstrap import LEVEL, compute_t_quantile
from .results import RunResult

_SHARES = (
    r"(dice(_.*)?|(balanced_)?accuracy|auc(_roc|_pr)?|f1|c_index|brier|ibs|calibration_error|event_rate|prevalence)"
)
_RANGES = {
    rf"(val_)?(mean_)?{_SHARES}": (0.0, 1.0),
    r"mae|rmse|cross_entropy|hd95(_.*)?": (0.0, inf),
    r"calibration_[0-9].*": (-1.0, 1.0),
    r"r2": (-inf, 1.0),
}
"""Smallest and largest value of metrics, by pattern of their names."""


@dataclass(frozen=True)
class Subgroup:
    """One subgroup.

    Attributes:
        column: column of the data.
        label: value or bin of the column.
        subjects: test subjects at the sites that reported it.
        sites: number of these sites.
        metrics: value and standard error by metric: the mean over sites, weighted by their subjects of the subgroup.
    """

    column: str
    label: str
    subjects: int
    sites: int
    metrics: dict[str, tuple[float, float]]

    def compute_interval(self, metric: str, level: float = LEVEL) -> tuple[float, float]:
        """Return the interval of a metric, which stays in the metric's range.

        Between 0 and 1 it is Wilson's, of as many subjects as have the standard error (Franco et al. 2019, J. Surv.
        Stat. Methodol. 7:334); where no resample differs, as at an AUC of 1, of the subgroup's. Other intervals
        are Student's, of as many subjects, and end where the range does.
        """
        value, error = self.metrics[metric]
        z = NormalDist().inv_cdf((1 + level) / 2)
        fitting = (r for pattern, r in _RANGES.items() if re.fullmatch(pattern, metric) and r[0] <= value <= r[1])
        lowest, highest = next(fitting, (-inf, inf))
        if (lowest, highest) != (0, 1):
            reach = compute_t_quantile(z, max(self.subjects - 1, 1)) * error
            return max(value - reach, lowest), min(value + reach, highest)
        variance = value * (1 - value)
        weight = z**2 / ((variance / error**2 if error else 0) or self.subjects)
        center, reach = value + weight / 2, sqrt(weight * variance + weight**2 / 4)
        return max((center - reach) / (1 + weight), 0.0), min((center + reach) / (1 + weight), 1.0)


@dataclass(frozen=True)
class Gap:
    """The largest difference between two subgroups of one column.

    Attributes:
        metric: the metric.
        better, worse: the subgroups.
        value: absolute difference.
        low: lower bound of its 95 % interval, which is wider the more pairs of subgroups were compared.
        high: upper bound.
    """

    metric: str
    better: Subgroup
    worse: Subgroup
    value: float
    low: float
    high: float


def pool_subgroups(run: RunResult) -> list[Subgroup]:
    """Return the subgroups of a run's final evaluation, by column and label; empty without ``task.subgroups``."""
    cells: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for metrics in run.summary["final"]["sites"].values():
        by_cell: dict[str, dict[str, float]] = {}
        for name, value in metrics.items():
            if (found := split_metric(name)) and found[1] != EVERYONE:
                by_cell.setdefault(found[1], {})[found[0]] = value
        for cell, values in by_cell.items():
            if (count := values.pop(SUBJECTS, 0.0)) >= 1:
                cells.setdefault(cell, []).append((count, values))
    subgroups = run.config.get("task", {}).get("subgroups", [])
    order = [make_plain(parse_subgroup(text)[0]) for text in subgroups]
    pooled = [_pool(cell, parts) for cell, parts in cells.items()]
    return sorted(pooled, key=lambda cell: (order.index(cell.column) if cell.column in order else 99, _sort_key(cell)))


def find_largest_gap(run: RunResult, subgroups: Sequence[Subgroup]) -> Gap | None:
    """Return the largest gap in the run's own metric; None if no column has two subgroups with it."""
    metric = run.metric
    pairs = [
        (first, second)
        for first, second in combinations([cell for cell in subgroups if metric in cell.metrics], 2)
        if first.column == second.column
    ]
    if not pairs:
        return None
    first, second = max(pairs, key=lambda pair: abs(pair[0].metrics[metric][0] - pair[1].metrics[metric][0]))
    lower, higher = sorted((first, second), key=lambda cell: cell.metrics[metric][0])
    better, worse = (lower, higher) if run.lower_is_better else (higher, lower)
    (low, _), (high, _) = lower.metrics[metric], higher.metrics[metric]
    # Bonferroni: the largest of many differences excludes 0 by chance more often than one chosen beforehand. That of a
    # difference follows from those of its parts (Zou and Donner 2008, Stat. Med. 27:1693).
    level = 1 - (1 - LEVEL) / len(pairs)
    low_ends, high_ends = lower.compute_interval(metric, level), higher.compute_interval(metric, level)
    gap = high - low
    reach = hypot(high - high_ends[0], low_ends[1] - low), hypot(high_ends[1] - high, low - low_ends[0])
    return Gap(metric, better, worse, gap, gap - reach[0], gap + reach[1])


def _pool(cell: str, parts: Sequence[tuple[float, dict[str, float]]]) -> Subgroup:
    column, _, label = cell.partition("=")
    metrics = {}
    for name in dict.fromkeys(name for _, values in parts for name in values if not name.startswith(ERROR)):
        known = [
            (n, values[name], values[ERROR + name]) for n, values in parts if {name, ERROR + name} <= values.keys()
        ]
        if total := sum(n for n, _, _ in known):
            mean = sum(n * value for n, value, _ in known) / total
            metrics[name] = mean, sqrt(sum((n * error) ** 2 for n, _, error in known)) / total
    return Subgroup(column, label, int(sum(n for n, _ in parts)), len(parts), metrics)


def _sort_key(cell: Subgroup) -> tuple[float, str]:
    try:
        return float(cell.label.partition(" to ")[0]), cell.label
    except ValueError:
        return float("inf"), cell.label
