"""Tables of paired differences: runs beside their trivial baselines, and beside one another."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..runs.comparison import describe_groups, explain_missing_metrics
from ..runs.results import RunResult
from .findings import VERDICTS
from .tables import ReportTable, format_metric


def build_comparisons(runs: Sequence[RunResult]) -> ReportTable | None:
    """Return each run beside its trivial baselines, on the same test subjects; None without any predictions."""
    rows, lacks = [], []
    for run in runs:
        predictions = run.predictions
        if predictions is None:
            continue
        differences = predictions.differences
        for name, by_metric in differences.items():
            if text := explain_missing_metrics(predictions, name, by_metric):
                lacks.append(f"{run.label} against {name}: {text}.")
        for metric in dict.fromkeys(metric for by_metric in differences.values() for metric in by_metric):
            for name, by_metric in differences.items():
                if metric in by_metric:
                    rows.append([f"{run.label} against {name}", metric, *_format_difference(by_metric[metric])])
    columns = ["comparison", "metric", "run", "baseline", "difference", "verdict", "sites that gain", "worst site"]
    note = (
        "On the test subjects of all sites at once; in brackets the 95 % bootstrap interval over subjects within their "
        "site. Better and worse: the interval excludes 0, and the subjects are at least five "
        "more than the sites. The baselines are the mean of "
        "each site, and a linear model of each site alone and of all sites pooled."
    )
    table = ReportTable("Compared with trivial baselines", columns, rows, " ".join([note, *lacks]))
    return table if rows or lacks else None


def build_group_comparisons(runs: Sequence[RunResult]) -> ReportTable | None:
    """Return each pair of runs on the test subjects that both have, seeds and folds taken together."""
    groups, rows = describe_groups(runs), []
    labels, left_out = [group["label"] for group in groups], []
    for number, group in enumerate(groups):
        for other in labels[number + 1 :]:
            for metric, difference in group.get("differences", {}).get(other, {}).items():
                rows.append([f"{group['label']} against {other}", metric, *_format_difference(difference)])
            if reason := group.get("notes", {}).get(other):
                left_out.append(f"{group['label']} against {other}: {reason}.")
    columns = ["comparison", "metric", "first", "second", "difference", "verdict", "sites that gain", "worst site"]
    note = "Every subject counts once, with its mean over the seeds and folds that tested it; intervals as above."
    table = ReportTable("Runs on the same test subjects", columns, rows, " ".join([note, *left_out]))
    return table if rows or left_out else None


def _format_difference(difference: Mapping[str, Any]) -> list[str]:
    share, worst = difference["sites_that_gain"], difference["worst_site"]
    change = f"{difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"
    return [
        format_metric(difference["first"]),
        format_metric(difference["second"]),
        change,
        VERDICTS[difference["verdict"]],
        "-" if share is None else f"{share:.0%}",
        f"{worst} ({difference['by_site'][worst]:+.3f})" if worst else "-",
    ]
