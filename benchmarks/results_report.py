"""docs/results.md's tables and plot from what ``benchmarks/results.py`` left, which calls this when it ends.

    python benchmarks/results_report.py [--out runs/results]

The text above the tables is kept, and so are the tables of experiments of which nothing is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- tables -->"
TITLES = {
    "brain_t1": "Brain age from T1w volumes, five sites",
    "uniform_iid": "FedSparsify, eight sites of equal size, ages mixed",
    "skewed_noniid": "FedSparsify, eight sites of skewed size, each with its own range of ages",
    "scanners_age": "Brain age from FreeSurfer tables, 23 real scan sites",
    "scanners_sex": "Sex from FreeSurfer tables, 23 real scan sites",
}
DRAWN = {
    "NeuroSFL (SNIP)": "#0072b2",
    "random mask": "#d55e00",
    "random mask, ERK": "#e69f00",
    "IndividualSNIP": "#cc79a7",
    "DisPFL": "#56b4e9",
    "top-k with error feedback": "#009e73",
}
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    write(parser.parse_args().out)
    return 0


def write(folder: Path) -> None:
    """Bring docs/results.md and its plot in step with the runs in ``folder``."""
    found = {name: [json.loads(file.read_text()) for file in sorted((folder / name).glob("*.json"))] for name in TITLES}
    found = {name: rows for name, rows in found.items() if rows}
    page = ROOT / "docs" / "results.md"
    text, _, tables = page.read_text().partition(MARK)
    sections = {part.partition("\n")[0]: "\n## " + part for part in tables.split("\n## ")[1:]}
    sections |= {TITLES[name]: section(name, rows) for name, rows in found.items()}
    page.write_text(text + MARK + "\n" + "".join(sections[title] for title in TITLES.values() if title in sections))
    if "brain_t1" in found:
        plot(found["brain_t1"], ROOT / "docs" / "images" / "results.png")


def section(name: str, rows: list[Row]) -> str:
    """Three tables, method by sparsity: the metric over all sites, the worst site's, and what travelled."""
    seeds, metric = sorted({row["seed"] for row in rows}), rows[0]["metric"]
    unit, scale = (f"{metric.upper()}, {rows[0]['unit']}", 1) if rows[0]["mode"] == "min" else (f"{metric}, %", 100)
    digits = 2 if scale == 1 else 1
    sites, tested = len(rows[0]["sites"]), int(rows[0]["overall"]["test_examples"])
    head = (
        f"\n## {TITLES[name]}\n\n`python benchmarks/results.py ../shared/data --only {name} --seeds "
        f"{' '.join(map(str, seeds))}`: {rows[0]['rounds']} rounds, {sites} sites, {tested} test subjects.\n"
    )
    worst = min if rows[0]["mode"] == "max" else max
    tables = [
        (f"{unit}, all sites' test subjects", lambda row: scale * row["overall"][metric], digits),
        (f"{unit}, worst site", lambda row: scale * worst(s[metric] for s in row["sites"].values()), digits),
        ("MB sent, all sites, both ways, the whole run", lambda row: row["bytes"] / 1e6, 1),
    ]
    return head + "".join(table(title, rows, figure, digits, len(seeds)) for title, figure, digits in tables)


def table(title: str, rows: list[Row], figure: Callable[[Row], float], digits: int, seeds: int) -> str:
    """Mean over seeds (lowest to highest); a cell of fewer than ``seeds`` says of how many."""
    levels = sorted({row["sparsity"] for row in rows})
    lines = [
        f"\n**{title}**\n",
        "| | " + " | ".join(f"{100 * level:g} %" if level else "dense" for level in levels) + " |",
    ]
    lines.append("| --- |" + " --- |" * len(levels))
    for label in dict.fromkeys(row["label"] for row in ordered(rows)):
        mine = [row for row in rows if row["label"] == label]
        cells = [spread([figure(row) for row in mine if row["sparsity"] == level], digits, seeds) for level in levels]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def ordered(rows: list[Row]) -> list[Row]:
    """Dense ones first, then as drawn, then the others by name."""
    drawn = list(DRAWN)
    return sorted(
        rows,
        key=lambda row: (
            row["sparsity"] > 0,
            drawn.index(row["label"]) if row["label"] in drawn else len(drawn),
            row["label"],
        ),
    )


def spread(values: list[float], digits: int, seeds: int) -> str:
    if not values:
        return ""
    text, few = f"{mean(values):.{digits}f}", f" [{len(values)} of {seeds} seeds]" if len(values) < seeds else ""
    if max(values) - min(values) >= 0.5 * 10**-digits:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return text + few


def plot(rows: list[Row], path: Path) -> None:
    """Error by sparsity, a dot a seed; and how much of each layer lives at 98 %."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 5), layout="constrained", width_ratios=(1.2, 1))
    for label, colour in DRAWN.items():
        levels = sorted({row["sparsity"] for row in rows if row["label"] == label})
        if not levels:
            continue
        series = [[figure_of(row) for row in rows if (row["label"], row["sparsity"]) == (label, s)] for s in levels]
        left.plot([off(s) for s in levels], [mean(values) for values in series], color=colour, label=label)
        for s, values in zip(levels, series, strict=True):
            left.scatter([off(s)] * len(values), values, color=colour, s=12)
    for label, style in (("FedAvg", "-"), ("pooled", ":"), ("local only", "--")):
        values = [figure_of(row) for row in rows if row["label"] == label]
        if values:
            left.axhline(mean(values), color="0.45", linestyle=style, linewidth=1, label=f"{label}, dense")
    levels = sorted({row["sparsity"] for row in rows if row["sparsity"]})
    left.set_xticks([off(s) for s in levels], [f"{100 * s:g} %" for s in levels])
    left.set(xlabel="sparsity", ylabel="test error: MAE, years", title="Error, a dot a seed")
    left.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    layers(rows, right)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def layers(rows: list[Row], axes: Any) -> None:
    """Live share of every convolution and linear layer at 98 %, mean over seeds."""
    for label, shares in live_shares(rows):
        axes.plot(range(len(shares)), [100 * share for share in shares], "o-", color=DRAWN[label], label=label, ms=4)
    axes.set(yscale="log", xlabel="layer, first to last", ylabel="live weights, %", title="What lives at 98 %")
    axes.legend(frameon=False, fontsize=8)


def live_shares(rows: list[Row]) -> Iterator[tuple[str, list[float]]]:
    for label in ("NeuroSFL (SNIP)", "random mask", "random mask, ERK"):
        mine = [list(row["live"].values()) for row in rows if (row["label"], row["sparsity"]) == (label, 0.98)]
        if mine:
            yield label, [mean(run[i][0] / run[i][1] for run in mine) for i in range(len(mine[0]))]


def figure_of(row: Row) -> float:
    return float(row["overall"][row["metric"]])


def off(sparsity: float) -> float:
    """Where a sparsity stands on the axis: even steps for 50, 80, 90, 95, 98 %."""
    return [0.5, 0.8, 0.9, 0.95, 0.98].index(sparsity)


if __name__ == "__main__":
    sys.exit(main())
