"""Tables and picture of hippocampus.py: means over test cases with intervals, and paired differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from runs import compare_scores

from flare_sparse.results.runs.bootstrap import Difference
from flare_sparse.tasks.task import Picture

Row = tuple[str, float]
Cases = dict[tuple[str, str], np.ndarray]
"""Metrics ``(m,)`` of each case, by site and identifier; means over the runs that tested the case."""


@dataclass(frozen=True)
class Shown:
    """A metric of the tables: its label, its column among a case's metrics, and how it is written."""

    label: str
    column: int
    digits: str
    is_lower_better: bool = False


def group_lines(lines: list[dict[str, Any]]) -> dict[Row, list[dict[str, Any]]]:
    """Return the runs of each row of the table."""
    rows: dict[Row, list[dict[str, Any]]] = {}
    for line in lines:
        rows.setdefault((line["row"], line["sparsity"]), []).append(line)
    return rows


def label_row(name: str, sparsity: float) -> str:
    """Return the first two cells of a row."""
    return f"{name} | {sparsity:.0%}" if sparsity else f"{name} | "


def format_interval(value: str, low: float, high: float, digits: str) -> str:
    """Return a value and its interval."""
    return f"{value} ({low:{digits}} to {high:{digits}})"


def average_cases(lines: list[dict[str, Any]]) -> Cases:
    """Return the metrics of each case, sorted by site and identifier."""
    values: dict[tuple[str, str], list[list[float]]] = {}
    for line in lines:
        for site, cases in line["sites"].items():
            for case, metrics in cases.items():
                values.setdefault((site, case), []).append(metrics)
    return {key: np.mean(values[key], axis=0) for key in sorted(values)}


def estimate_interval(values: np.ndarray, sites: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean of ``(n,)`` values, by resampling cases within their sites."""
    difference = compare_scores(values, np.zeros_like(values), sites, is_lower_better=False)
    return difference.low, difference.high


def compare_rows(first: Cases, second: Cases, metric: int, *, is_lower_better: bool, site: str = "") -> Difference:
    """Compare two rows on the cases that both tested, at one site or at all."""
    keys = [key for key in first if key in second and site in ("", key[0])]
    values = (np.array([cases[key][metric] for key in keys]) for cases in (first, second))
    return compare_scores(*values, np.array([key[0] for key in keys]), is_lower_better=is_lower_better)


def print_report(lines: list[dict[str, Any]]) -> None:
    """Print metrics, paired differences and Dice by site of every row, with HD95 where it was measured."""
    rows = group_lines(lines)
    cases = {row: average_cases(runs) for row, runs in rows.items()}
    metrics = lines[0]["metrics"]
    shown = [Shown("Dice", 0, ".3f")]
    if "hd95" in metrics:
        shown.append(Shown("HD95 (mm)", metrics.index("hd95"), ".2f", is_lower_better=True))
    print("\n".join(format_metrics(rows, cases, metrics, shown)), end="\n\n")
    if dense := cases.get(("fedavg", 0.0)):
        print("\n".join(format_differences(cases, dense, shown)), end="\n\n")
    print("\n".join(format_sites(cases, shown)))


def format_metrics(
    rows: dict[Row, list[dict[str, Any]]], cases: dict[Row, Cases], metrics: list[str], shown: list[Shown]
) -> Iterator[str]:
    """Yield a table of the metrics over all test cases."""
    heads = [shown[0].label, *metrics[1:3], *(metric.label for metric in shown[1:])]
    yield f"| run | sparsity | cases | {' | '.join(heads)} | MB |"
    yield "|" + " --- |" * (4 + len(heads))
    for (name, sparsity), runs in rows.items():
        table = np.array(list(cases[name, sparsity].values()))
        sites = np.array([site for site, _ in cases[name, sparsity]])
        means = table.mean(axis=0)
        first, *others = (
            format_interval(f"{means[m.column]:{m.digits}}", *estimate_interval(table[:, m.column], sites), m.digits)
            for m in shown
        )
        sent = np.mean([line["bytes"] for line in runs]) / 1e6
        classes = [f"{value:.3f}" for value in means[1:3]]
        cells = [label_row(name, sparsity), len(table), first, *classes, *others, f"{sent:.1f}"]
        yield f"| {' | '.join(map(str, cells))} |"


def format_differences(cases: dict[Row, Cases], dense: Cases, shown: list[Shown]) -> Iterator[str]:
    """Yield a table of the differences from dense FedAvg on the same cases."""
    yield "| run minus FedAvg | sparsity |" + "".join(f" {metric.label} | |" for metric in shown)
    yield "|" + " --- |" * (2 + 2 * len(shown))
    for (name, sparsity), values in cases.items():
        if values is not dense:
            cells = [label_row(name, sparsity)]
            for metric in shown:
                found = compare_rows(values, dense, metric.column, is_lower_better=metric.is_lower_better)
                digits = f"+{metric.digits}"
                cells += [format_interval(f"{found.value:{digits}}", found.low, found.high, digits), found.verdict]
            yield f"| {' | '.join(cells)} |"


def format_sites(cases: dict[Row, Cases], shown: list[Shown]) -> Iterator[str]:
    """Yield a table of the metrics by site, and whether a row is ahead of the site's own model there."""
    first = next(iter(cases.values()))
    sites = sorted({site for site, _ in first})
    counts = [sum(site == name for site, _ in first) for name in sites]
    heads = " | ".join(f"{s}, {n} cases" for s, n in zip(sites, counts, strict=True))
    yield f"| {' / '.join(metric.label for metric in shown)} | sparsity | {heads} |"
    yield "|" + " --- |" * (2 + len(sites))
    alone = cases.get(("local_only", 0.0))
    for (name, sparsity), values in cases.items():
        cells = []
        for site in sites:
            means = np.mean([row for key, row in values.items() if key[0] == site], axis=0)
            cell = " / ".join(f"{means[metric.column]:{metric.digits}}" for metric in shown)
            if alone is not None and values is not alone:
                cell += f", {compare_rows(values, alone, 0, is_lower_better=False, site=site).verdict}"
            cells.append(cell)
        yield f"| {label_row(name, sparsity)} | " + " | ".join(cells) + " |"


def draw_cases(cases: list[tuple[str, float, Picture]], file: Path) -> None:
    """Draw the best, the median and the worst case: outlines of labels (solid) and prediction (dashed)."""
    from matplotlib import pyplot as plt

    from flare_sparse.results.report.figures import STYLE, draw_case
    from flare_sparse.results.runs.predictions import RANKS, CasePicture

    plt.style.use(STYLE)
    figure, axes = plt.subplots(1, len(cases), figsize=(3.2 * len(cases), 3.6), layout="constrained")
    for rank, axis, (site, dice, picture) in zip(RANKS, axes, cases, strict=True):
        draw_case(axis, CasePicture(f"site {site}", rank, dice, picture), "Dice")
    figure.savefig(file)
