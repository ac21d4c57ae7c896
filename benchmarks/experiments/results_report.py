"""Update the tables and the plot of docs/results.md from the files of ``results.py``, which calls this with ``--docs``.

    python benchmarks/experiments/results_report.py [--out runs/results]

The text above the tables is kept, and so are the tables of experiments without files.
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

ROOT = Path(__file__).resolve().parents[2]
MARK = "<!-- tables -->"
TITLES = {
    "brain_t1": "Brain age from T1w volumes, five sites",
    "uniform_iid": "FedSparsify, eight sites of equal size, ages mixed",
    "skewed_noniid": "FedSparsify, eight sites of skewed size, each with its own range of ages",
    "scanners_age": "Brain age from FreeSurfer tables, 23 real scan sites",
    "scanners_sex": "Sex from FreeSurfer tables, 23 real scan sites",
}
COLOURS = {
    "NeuroSFL (SNIP)": "#0072b2",
    "random mask": "#d55e00",
    "random mask, ERK": "#e69f00",
    "IndividualSNIP": "#cc79a7",
    "DisPFL": "#56b4e9",
    "top-k with error feedback": "#009e73",
}
SHORT_LABELS = {
    "IndividualSNIP, one random site's": "IndividualSNIP, one",
    "iterative SNIP, 10 minibatches": "SNIP, 10 batches",
    "iterative SNIP, progressive": "SNIP, progressive",
    "top-k with error feedback": "top-k, feedback",
}
"""Labels of wide tables, whose lines would otherwise exceed 120 columns."""
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    update_docs(parser.parse_args().out)
    return 0


def update_docs(folder: Path) -> None:
    """Update docs/results.md and its plot from the runs in ``folder``."""
    results = {
        name: [json.loads(file.read_text()) for file in sorted((folder / name).glob("*.json"))] for name in TITLES
    }
    results = {name: rows for name, rows in results.items() if rows}
    page = ROOT / "docs" / "results.md"
    text, _, tables = page.read_text().partition(MARK)
    sections = {part.partition("\n")[0]: "\n## " + part for part in tables.split("\n## ")[1:]}
    sections |= {TITLES[name]: format_section(name, rows) for name, rows in results.items()}
    page.write_text(text + MARK + "\n" + "".join(sections[title] for title in TITLES.values() if title in sections))
    if "brain_t1" in results:
        plot_results(results["brain_t1"], ROOT / "docs" / "images" / "results.png")


def format_section(name: str, rows: list[Row]) -> str:
    """Return three tables, method by sparsity: metric of all sites, metric of the worst site, MB sent."""
    seeds, metric = sorted({row["seed"] for row in rows}), rows[0]["metric"]
    unit, scale = (f"{metric.upper()}, {rows[0]['unit']}", 1) if rows[0]["mode"] == "min" else (f"{metric}, %", 100)
    digits = 2 if scale == 1 else 1
    sites, tested = len(rows[0]["sites"]), int(rows[0]["overall"]["test_examples"])
    head = (
        f"\n## {TITLES[name]}\n\n`python benchmarks/experiments/results.py ../shared/data --only {name} --seeds "
        f"{' '.join(map(str, seeds))}`: {rows[0]['rounds']} rounds, {sites} sites, {tested} test subjects.\n"
    )
    worst = min if rows[0]["mode"] == "max" else max
    tables = [
        (f"{unit}, all sites' test subjects", lambda row: scale * row["overall"][metric], digits),
        (f"{unit}, worst site", lambda row: scale * worst(s[metric] for s in row["sites"].values()), digits),
        ("MB sent, all sites, both ways, the whole run", lambda row: row["bytes"] / 1e6, 1),
    ]
    return head + "".join(format_table(title, rows, figure, digits, len(seeds)) for title, figure, digits in tables)


def format_table(title: str, rows: list[Row], figure: Callable[[Row], float], digits: int, seeds: int) -> str:
    """Return means over seeds (lowest-highest); a cell with fewer than ``seeds`` values names their number."""
    levels = sorted({row["sparsity"] for row in rows})
    lines = [
        f"\n**{title}**\n",
        "||" + "|".join(f"{100 * level:g} %" if level else "dense" for level in levels) + "|",
    ]
    lines.append("| --- |" + " --- |" * len(levels))
    for label in dict.fromkeys(row["label"] for row in sort_rows(rows)):
        own = [row for row in rows if row["label"] == label]
        cells = [
            format_spread([figure(row) for row in own if row["sparsity"] == level], digits, seeds) for level in levels
        ]
        lines.append(f"|{SHORT_LABELS.get(label, label)}|" + "|".join(cells) + "|")
    return "\n".join(lines) + "\n"


def sort_rows(rows: list[Row]) -> list[Row]:
    """Return dense rows first, then those of the plot, then the others by name."""
    drawn = list(COLOURS)
    return sorted(
        rows,
        key=lambda row: (
            row["sparsity"] > 0,
            drawn.index(row["label"]) if row["label"] in drawn else len(drawn),
            row["label"],
        ),
    )


def format_spread(values: list[float], digits: int, seeds: int) -> str:
    if not values:
        return ""
    text, few = f"{mean(values):.{digits}f}", f" [{len(values)} of {seeds} seeds]" if len(values) < seeds else ""
    if max(values) - min(values) >= 0.5 * 10**-digits:
        text += f" ({min(values):.{digits}f}-{max(values):.{digits}f})"
    return text + few


def plot_results(rows: list[Row], path: Path) -> None:
    """Draw the error by sparsity, one dot per seed, and the live share of each layer at 98 %."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 5), layout="constrained", width_ratios=(1.2, 1))
    for label, colour in COLOURS.items():
        levels = sorted({row["sparsity"] for row in rows if row["label"] == label})
        if not levels:
            continue
        series = [[get_metric(row) for row in rows if (row["label"], row["sparsity"]) == (label, s)] for s in levels]
        left.plot([get_position(s) for s in levels], [mean(values) for values in series], color=colour, label=label)
        for s, values in zip(levels, series, strict=True):
            left.scatter([get_position(s)] * len(values), values, color=colour, s=12)
    for label, style in (("FedAvg", "-"), ("pooled", ":"), ("local only", "--")):
        values = [get_metric(row) for row in rows if row["label"] == label]
        if values:
            left.axhline(mean(values), color="0.45", linestyle=style, linewidth=1, label=f"{label}, dense")
    levels = sorted({row["sparsity"] for row in rows if row["sparsity"]})
    left.set_xticks([get_position(s) for s in levels], [f"{100 * s:g} %" for s in levels])
    left.set(xlabel="sparsity", ylabel="test error: MAE, years", title="Error, one dot per seed")
    left.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    plot_layers(rows, right)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def plot_layers(rows: list[Row], axes: Any) -> None:
    """Draw the live share of every convolution and linear layer at 98 %, mean over seeds."""
    for label, shares in compute_live_shares(rows):
        axes.plot(range(len(shares)), [100 * share for share in shares], "o-", color=COLOURS[label], label=label, ms=4)
    axes.set(yscale="log", xlabel="layer, first to last", ylabel="live weights, %", title="Live weights at 98 %")
    axes.legend(frameon=False, fontsize=8)


def compute_live_shares(rows: list[Row]) -> Iterator[tuple[str, list[float]]]:
    for label in ("NeuroSFL (SNIP)", "random mask", "random mask, ERK"):
        shares = [list(row["live"].values()) for row in rows if (row["label"], row["sparsity"]) == (label, 0.98)]
        if shares:
            yield label, [mean(run[i][0] / run[i][1] for run in shares) for i in range(len(shares[0]))]


def get_metric(row: Row) -> float:
    return float(row["overall"][row["metric"]])


def get_position(sparsity: float) -> float:
    """Return a sparsity's position on the axis, with even steps for 50, 80, 90, 95, 98 %."""
    return [0.5, 0.8, 0.9, 0.95, 0.98].index(sparsity)


if __name__ == "__main__":
    sys.exit(main())
