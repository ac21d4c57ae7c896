"""Final metrics by subgroup in the report and the model card."""

from collections.abc import Sequence

from ..runs.results import RunResult
from ..runs.subgroups import Gap, Subgroup, find_largest_gap, pool_subgroups
from .tables import ReportTable, format_metric

NOTE = (
    "Test subjects of the final model by subgroup: means over sites, weighted by their subjects of the subgroup; in "
    "brackets the 95 % interval from each site's bootstrap over its subjects. A site reports no subgroup with fewer "
    "subjects than task.min_subgroup or its policy says, nor one from which such a group could be computed."
)


def build_subgroups(runs: Sequence[RunResult]) -> ReportTable | None:
    """Return the metrics of each subgroup; None if no run has subgroups."""
    parts = [(run, cell) for run in runs for cell in pool_subgroups(run)]
    if not parts:
        return None
    names = list(dict.fromkeys(name for run, _ in parts for name in run.metric_names))
    rows = [
        [f"{cell.column} {cell.label}", run.label, str(cell.subjects), str(cell.sites)]
        + [_format_interval(cell, name) for name in names]
        for run, cell in parts
    ]
    return ReportTable("Subgroups", ["subgroup", "run", "subjects", "sites", *names], rows, NOTE)


def describe_gap(run: RunResult) -> str:
    """Return the largest gap between two subgroups in a sentence; empty without subgroups."""
    subgroups = pool_subgroups(run)
    gap = find_largest_gap(run, subgroups)
    if gap is None:
        asked = run.config.get("task", {}).get("subgroups")
        reason = "no column has two subgroups that are large enough to report"
        return f"No gap between subgroups of {run.label} is stated: {reason}." if asked else ""
    return f"{_describe_largest(run, gap)} {_describe_chance(gap)}"


def _describe_largest(run: RunResult, gap: Gap) -> str:
    unit = f" {run.summary['metric']['unit']}".rstrip()
    better, worse = (f"{cell.label} ({cell.metrics[gap.metric][0]:.3g})" for cell in (gap.better, gap.worse))
    return (
        f"The largest gap of {run.label} between subgroups is {gap.value:.3g}{unit} in {gap.metric}, by "
        f"{gap.better.column}: {worse} is worse than {better}."
    )


def _describe_chance(gap: Gap) -> str:
    interval = f"its 95 % interval, for all pairs of subgroups together, is {gap.low:.3g} to {gap.high:.3g}"
    if gap.low > 0:
        return f"It is more than chance: {interval}."
    return f"It may be chance: {interval}."


def _format_interval(cell: Subgroup, metric: str) -> str:
    if metric not in cell.metrics:
        return "-"
    low, high = cell.compute_interval(metric)
    return f"{format_metric(cell.metrics[metric][0])} [{low:.3f}, {high:.3f}]"
