"""Tables and picture of hippocampus.py: means over test cases with intervals, and paired differences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flare_sparse.results.runs.bootstrap import Difference, compare_scores
from flare_sparse.tasks.task import Picture

Row = tuple[str, float]
Cases = dict[tuple[str, str], np.ndarray]
"""Metrics ``(m,)`` of each case, by site and identifier; means over the runs that tested the case."""


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
    """Print metrics, paired differences and Dice by site of every row."""
    rows = group_lines(lines)
    cases = {row: average_cases(runs) for row, runs in rows.items()}
    metrics = lines[0]["metrics"]
    print("\n".join(format_metrics(rows, cases, metrics)), end="\n\n")
    if dense := cases.get(("fedavg", 0.0)):
        print("\n".join(format_differences(cases, dense, metrics.index("hd95"))), end="\n\n")
    print("\n".join(format_sites(cases, metrics.index("hd95"))))


def format_metrics(rows: dict[Row, list[dict[str, Any]]], cases: dict[Row, Cases], metrics: list[str]) -> Iterator[str]:
    """Yield a table of the metrics over all test cases."""
    yield "| run | sparsity | cases | Dice | " + " | ".join(metrics[1:3]) + " | HD95 (mm) | MB |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for (name, sparsity), runs in rows.items():
        table = np.array(list(cases[name, sparsity].values()))
        sites = np.array([site for site, _ in cases[name, sparsity]])
        means, distance = table.mean(axis=0), metrics.index("hd95")
        dice = format_interval(f"{means[0]:.3f}", *estimate_interval(table[:, 0], sites), ".3f")
        hd95 = format_interval(f"{means[distance]:.2f}", *estimate_interval(table[:, distance], sites), ".2f")
        sent = np.mean([line["bytes"] for line in runs]) / 1e6
        cells = [label_row(name, sparsity), len(table), dice, f"{means[1]:.3f}", f"{means[2]:.3f}", hd95, f"{sent:.1f}"]
        yield f"| {' | '.join(map(str, cells))} |"


def format_differences(cases: dict[Row, Cases], dense: Cases, distance: int) -> Iterator[str]:
    """Yield a table of the differences from dense FedAvg on the same cases."""
    yield "| run minus FedAvg | sparsity | Dice | | HD95 (mm) | |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for (name, sparsity), values in cases.items():
        if values is not dense:
            dice = compare_rows(values, dense, 0, is_lower_better=False)
            hd95 = compare_rows(values, dense, distance, is_lower_better=True)
            cells = [label_row(name, sparsity)]
            for difference, digits in ((dice, "+.3f"), (hd95, "+.2f")):
                value = f"{difference.value:{digits}}"
                cells += [format_interval(value, difference.low, difference.high, digits), difference.verdict]
            yield f"| {' | '.join(cells)} |"


def format_sites(cases: dict[Row, Cases], distance: int) -> Iterator[str]:
    """Yield a table of Dice and HD95 by site, and whether a row is ahead of the site's own model there."""
    first = next(iter(cases.values()))
    sites = sorted({site for site, _ in first})
    counts = [sum(site == name for site, _ in first) for name in sites]
    yield (
        "| Dice / HD95 | sparsity | " + " | ".join(f"{s}, {n} cases" for s, n in zip(sites, counts, strict=True)) + " |"
    )
    yield "| --- | --- | " + " | ".join("---" for _ in sites) + " |"
    alone = cases.get(("local_only", 0.0))
    for (name, sparsity), values in cases.items():
        cells = []
        for site in sites:
            means = np.mean([row for key, row in values.items() if key[0] == site], axis=0)
            cell = f"{means[0]:.3f} / {means[distance]:.2f}"
            if alone is not None and values is not alone:
                cell += f", {compare_rows(values, alone, 0, is_lower_better=False, site=site).verdict}"
            cells.append(cell)
        yield f"| {label_row(name, sparsity)} | " + " | ".join(cells) + " |"


def draw_cases(cases: list[tuple[str, float, Picture]], file: Path) -> None:
    """Draw the best, the median and the worst case: outlines of labels (solid) and prediction (dashed)."""
    from matplotlib import pyplot as plt

    from flare_sparse.results.report.figures import STYLE, draw_case
    from flare_sparse.results.runs.pictures import RANKS, CasePicture

    plt.style.use(STYLE)
    figure, axes = plt.subplots(1, len(cases), figsize=(3.2 * len(cases), 3.6), layout="constrained")
    for rank, axis, (site, dice, picture) in zip(RANKS, axes, cases, strict=True):
        draw_case(axis, CasePicture(f"site {site}", rank, dice, picture), "Dice")
    figure.savefig(file)
