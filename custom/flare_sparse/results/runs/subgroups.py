"""Final metrics by subgroup of the test subjects, over all sites, from what each site sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import NormalDist
from typing import Any

from ...core.subgroups import ERROR, EVERYONE, SUBJECTS, split_metric
from .results import RunResult

LEVEL = 0.95


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

    def compute_interval(self, metric: str) -> tuple[float, float]:
        """Return the 95 % interval of a metric."""
        value, error = self.metrics[metric]
        z = NormalDist().inv_cdf((1 + LEVEL) / 2)
        return value - z * error, value + z * error

    def to_dict(self) -> dict[str, Any]:
        """Return the subgroup with its intervals as JSON values."""
        metrics = {
            name: {"value": value, "error": error, "interval": list(self.compute_interval(name))}
            for name, (value, error) in self.metrics.items()
        }
        counts = {"subjects": self.subjects, "sites": self.sites}
        return {"column": self.column, "label": self.label, **counts, "metrics": metrics}


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
    order = [text.partition(":")[0] for text in run.config.get("task", {}).get("subgroups", [])]
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
    (own, own_error), (other, other_error) = first.metrics[metric], second.metrics[metric]
    value = abs(own - other)
    # Bonferroni: the largest of many differences excludes 0 by chance more often than one chosen beforehand.
    reach = NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / len(pairs)) * sqrt(own_error**2 + other_error**2)
    better, worse = (first, second) if (own < other) == run.lower_is_better else (second, first)
    return Gap(metric, better, worse, value, value - reach, value + reach)


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
