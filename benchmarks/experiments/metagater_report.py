"""Write docs/results/texts.md, docs/papers/metagater.md and their plots from the files of ``metagater.py``.

    python benchmarks/experiments/metagater_report.py [--out runs/metagater]

The text before and after the tables is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
from page_tables import write_section

mpl.use("Agg")
import matplotlib.pyplot as plt

plt.style.use("flare_sparse.results.report.plots")

ROOT = Path(__file__).resolve().parents[2]
"""Names of the tables of a setting, which are files of their own."""
FIRST = "FedAvg + one step"
ORDER = (
    FIRST,
    "FedAvg, an epoch a round, + one step",
    "Per-FedAvg (FO)",
    "MetaGater without gates",
    "MetaGater with gates",
    "MetaSNIP",
)
TITLES = {
    "cifar_small": "CIFAR-10, small sites: 20 sites of 30 to 100 images, 10 a round; 10 more sites as targets",
    "cifar_main": "CIFAR-10, main setting: 40 sites train, 20 a round; 10 more are targets; 221 to 2,792 images a site",
    "brain": "Brain age from morphometry: 39 scan sites train, half of them a round; 10 others are targets",
}
PRINTED = {
    "FedAvg + one step": "98.78",
    "Per-FedAvg (FO)": "99.05",
    "MetaGater, 1 local step": "99.2",
    "MetaGater, 2 local steps": "99.4",
    "MetaGater, up to 5 steps, xi = 0.01": "",
}
"""Arms of the paper's Table 1 with its accuracies."""
Run = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/metagater"))
    folder = parser.parse_args().out
    tables = {}
    for setting in TITLES:
        runs = [json.loads(file.read_text()) for file in sorted((folder / setting).glob("*.json"))]
        if any((rows := group_runs(runs)).values()):
            tables[setting] = rows
    sections = [format_table(setting, rows) + format_steps(rows) for setting, rows in tables.items()]
    if sections:
        write_section("texts", "metagater", "\n".join(sections))
        plot_targets(tables, ROOT / "docs" / "images" / "metagater.png")
    runs = [json.loads(file.read_text()) for file in sorted((folder / "mnist").glob("*.json"))]
    if runs:
        rows = group_runs(runs, tuple(PRINTED))
        write_section("../papers/metagater", "metagater_mnist", format_mnist(rows))
        plot_curve(rows, ROOT / "docs" / "images" / "paper_metagater.png")
    return 0


def format_mnist(rows: dict[str, list[Run]]) -> str:
    """Return Table 1 of the paper, with ours and the steps that validation chose."""
    seeds = sorted({run["seed"] for runs in rows.values() for run in runs})
    lines = ["| | accuracy, %: paper | accuracy, % | before the step | chosen steps, by seed |"]
    lines += ["| --- " * 5 + "|"]
    for label, paper in PRINTED.items():
        own = [next(run for run in rows[label] if run["seed"] == seed) for seed in seeds]
        figures = [get_figures(run) for run in own]
        cells = [
            paper,
            format_spread([100 * f["accuracy"] for f in figures], 1),
            format_spread([100 * f["accuracy_before"] for f in figures], 1),
            "; ".join(f"{run['chosen']['step']}, adapt {run['chosen']['adapt_lr']:g}" for run in own),
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |".replace("|  |", "| |"))
    return f"Seeds: {len(seeds)}.\n\n" + "\n".join(lines) + "\n"


def plot_curve(rows: dict[str, list[Run]], path: Path) -> None:
    """Draw the accuracy at the targets after one step by rounds of training, as the paper's Figure 4 does."""
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for number, (label, runs) in enumerate(rows.items()):
        curves = [
            {**{int(t): value for t, value in run["curve"].items()}, run["rounds"]: get_figures(run)["accuracy"]}
            for run in runs
        ]
        rounds = sorted(curves[0])
        means = [100 * mean(curve[t] for curve in curves) for t in rounds]
        for curve in curves:
            axes.plot(rounds, [100 * curve[t] for t in rounds], ".", color=f"C{number}", alpha=0.5)
        axes.plot(rounds, means, color=f"C{number}", label=label)
    axes.set(xlabel="rounds of training", ylabel="accuracy at targets after a step, %", xscale="log")
    axes.set_xticks(rounds, [str(t) for t in rounds])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)


def group_runs(runs: list[Run], order: tuple[str, ...] = ORDER) -> dict[str, list[Run]]:
    """Return the runs by arm, of the seeds that all arms have finished: a mean over other seeds compares nothing."""
    labels = [label for label in order if any(run["label"] == label for run in runs)]
    finished = [run["seed"] for run in runs]
    seeds = {seed for seed in finished if finished.count(seed) == len(labels)}
    return {label: [run for run in runs if run["label"] == label and run["seed"] in seeds] for label in labels}


def get_figures(run: Run) -> dict[str, float]:
    """Return the metrics at the targets with the step that the training sites chose."""
    figures: dict[str, float] = run["targets"][str(run["chosen"]["adapt_lr"])]
    return figures


def get_scale(run: Run) -> tuple[int, int]:
    """Return the factor of a run's metric in the tables, and the digits after the point."""
    return (1, 2) if run["metric"] == "mae" else (100, 1)


def format_table(setting: str, rows: dict[str, list[Run]]) -> str:
    """Return a Markdown table of means and standard deviations over seeds."""
    example = next(iter(rows.values()))[0]
    metric, (scale, digits) = example["metric"], get_scale(example)
    seeds = sorted({run["seed"] for runs in rows.values() for run in runs})
    first = {run["seed"]: get_figures(run)[metric] for run in rows.get(FIRST, [])}
    unit = "MAE, years" if metric == "mae" else "accuracy, %"
    gated = metric != "mae"
    lines = [
        f"## {TITLES[setting]}",
        "",
        (
            f"`python benchmarks/experiments/metagater.py {setting} ../shared/data --rounds {example['rounds']} "
            f"--seeds {' '.join(map(str, seeds))}`"
        ),
        "",
        f"| | {unit} | minus FedAvg, by seed | before |{' closed, % |' * gated} train s | adapt s | sent / dense |",
        "|" + " --- |" * (7 + gated),
    ]
    for label, runs in rows.items():
        figures = [get_figures(run) for run in runs]
        closed = [f.get("pruned", f.get("channel_sparsity")) for f in figures]
        gains = [scale * (get_figures(r)[metric] - first[r["seed"]]) for r in runs if r["seed"] in first]
        cells = [
            "**" + format_spread([scale * f[metric] for f in figures], digits) + "**",
            " ".join(f"{gain:+.{digits}f}" for gain in gains) if label != FIRST else "",
            format_spread([scale * f[f"{metric}_before"] for f in figures], digits),
            *(["" if None in closed else format_spread([100 * c for c in closed], 0)] if gated else []),
            format_spread([r["training_s"] for r in runs], 0) if "training_s" in runs[0] else "as without gates",
            format_spread([r["adapt_s"] for r in runs], 2),
            f"{mean(r['bytes'] / r['dense_bytes'] for r in runs):.3f}" if "bytes" in runs[0] else "",
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines).replace("|  |", "| |") + "\n"


def format_steps(rows: dict[str, list[Run]]) -> str:
    """Return tables of the chosen steps, and of the metric by step of adaptation on validation examples and targets."""
    rates = list(next(iter(rows.values()))[0]["targets"])
    seeds = sorted({run["seed"] for runs in rows.values() for run in runs})
    lines = ["", "| chosen steps | " + " | ".join(f"seed {seed}" for seed in seeds) + " |"]
    lines.append("|" + " --- |" * (len(seeds) + 1))
    for label, runs in rows.items():
        chosen = {
            r["seed"]: f"{r['chosen']['step']}, step {r['chosen']['adapt_lr']:g}".removeprefix(", ") for r in runs
        }
        lines.append(f"| {label} | " + " | ".join(chosen.get(seed, "") for seed in seeds) + " |")
    lines += ["", "Mean over seeds by step of adaptation; the targets' figures choose nothing:", ""]
    lines += ["| adapt_lr | on | " + " | ".join(rates) + " |", "|" + " --- |" * (len(rates) + 2)]
    for label, runs in rows.items():
        metric, (scale, digits) = runs[0]["metric"], get_scale(runs[0])
        parts = {
            "validation": [run["validation"][run["chosen"]["step"]] for run in runs],
            "targets": [run["targets"] for run in runs],
        }
        for name, part in parts.items():
            cells = [f"{scale * mean(figures[rate][metric] for figures in part):.{digits}f}" for rate in rates]
            lines.append(f"| {label} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def format_spread(values: list[float], digits: int) -> str:
    around = f"±{stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{around}"


def plot_targets(tables: dict[str, Any], path: Path) -> None:
    """Draw each seed before and after one step, a panel per table, one below the other: readable at half size."""
    figure, panels = plt.subplots(len(tables), 1, figsize=(5.6, 3.2 * len(tables)), layout="constrained", squeeze=False)
    for axes, (setting, rows) in zip(panels[:, 0], tables.items(), strict=True):
        metric = "mae" if setting == "brain" else "accuracy"
        shown = list(rows)
        for y, label in enumerate(reversed(shown)):
            figures = [get_figures(run) for run in rows[label]]
            before, after = [f[f"{metric}_before"] for f in figures], [f[metric] for f in figures]
            axes.plot([mean(before), mean(after)], [y, y], color="0.7", zorder=1)
            axes.scatter(
                before, [y] * len(before), facecolors="none", edgecolors="C0", label="before" if y == 0 else None
            )
            axes.scatter(after, [y] * len(after), color="C1", label="after one step" if y == 0 else None)
        axes.set(xlabel="MAE, years" if metric == "mae" else "accuracy at targets", title=setting.replace("_", " "))
        axes.set_yticks(range(len(shown)), list(reversed(shown)))
        axes.grid(visible=False, axis="y")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
