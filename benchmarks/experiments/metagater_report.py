"""Write docs/results/metagater.md and its plot from the files of ``metagater.py``.

    python benchmarks/experiments/metagater_report.py [--out runs/metagater]

The text above the tables is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    "FedAvg + one step",
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/metagater"))
    folder = parser.parse_args().out
    tables = {}
    for setting in TITLES:
        runs = [json.loads(file.read_text()) for file in sorted((folder / setting).glob("*.json"))]
        if runs:
            tables[setting] = {label: [r for r in runs if r["label"] == label] for label in ORDER}
    page = ROOT / "docs" / "results" / "metagater.md"
    text = page.read_text().partition("<!-- tables -->")[0] if page.exists() else "# MetaGater, measured\n\n"
    page.write_text(
        text
        + "<!-- tables -->\n\n"
        + "\n".join(format_table(s, rows) + format_sweep(s, folder / s) for s, rows in tables.items())
    )
    plot_targets(tables, ROOT / "docs" / "images" / "metagater.png")
    return 0


def format_table(setting: str, rows: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table of means and standard deviations over seeds."""
    example = next(runs[0] for runs in rows.values() if runs)
    metric = "mae" if setting == "brain" else "accuracy"
    unit = "MAE, years" if setting == "brain" else "accuracy, %"
    scale = 1 if setting == "brain" else 100
    seeds = sorted({r["seed"] for runs in rows.values() for r in runs})
    lines = [
        f"## {TITLES[setting]}",
        "",
        (
            f"`python benchmarks/experiments/metagater.py {setting} ../shared/data --rounds {example['rounds']} "
            f"--seeds {' '.join(map(str, seeds))}`"
        ),
        "",
        (f"| | seeds | {unit} | before | closed, % | train s | adapt s | infer s | sent / dense |"),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for label, runs in rows.items():
        if not runs:
            continue
        closed = [r["metrics"].get("pruned", r["metrics"].get("channel_sparsity")) for r in runs]
        cells = [
            str(len(runs)),
            "**" + format_spread([scale * r["metrics"][metric] for r in runs], 1 if scale > 1 else 2) + "**",
            format_spread([scale * r["metrics"][f"{metric}_before"] for r in runs], 1 if scale > 1 else 2),
            "" if None in closed else format_spread([100 * c for c in closed], 0),
            format_spread([r["training_s"] for r in runs], 0) if runs[0]["training_s"] else "as without gates",
            format_spread([r["adapt_s"] for r in runs], 2),
            format_spread([r["infer_s"] for r in runs], 2),
            format_spread([r["bytes"] / r["dense_bytes"] for r in runs], 3) if "bytes" in runs[0] else "",
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines).replace("|  |", "| |") + "\n"


def format_sweep(setting: str, folder: Path) -> str:
    """Return a table of the same models adapted with other learning rates; empty without a sweep."""
    sweeps = [json.loads(file.read_text()) for file in sorted(folder.glob("*.sweep"))]
    if not sweeps:
        return ""
    rates = list(sweeps[0]["rates"])
    scale, digits = (1, 2) if setting == "brain" else (100, 1)
    lines = [
        "",
        f"The same models with other learning rates of adaptation, `--sweep {' '.join(rates)}`:",
        "",
        "| adapt_lr | seeds | " + " | ".join(rates) + " |",
    ]
    lines.append("| --- |" + " --- |" * (len(rates) + 1))
    for label in ORDER:
        runs = [f for f in sweeps if f["label"] == label]
        if runs:
            cells = [format_spread([scale * r["rates"][rate] for r in runs], digits) for rate in rates]
            lines.append(f"| {label} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def format_spread(values: list[float], digits: int) -> str:
    around = f"±{stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{around}"


def plot_targets(tables: dict[str, Any], path: Path) -> None:
    """Draw each seed before and after one step, one panel per table."""
    figure, panels = plt.subplots(1, len(tables), figsize=(5 * len(tables), 3.6), layout="constrained", squeeze=False)
    for axes, (setting, rows) in zip(panels[0], tables.items(), strict=True):
        metric = "mae" if setting == "brain" else "accuracy"
        shown = [label for label in ORDER if rows[label]]
        for y, label in enumerate(reversed(shown)):
            before = [r["metrics"][f"{metric}_before"] for r in rows[label]]
            after = [r["metrics"][metric] for r in rows[label]]
            axes.plot([mean(before), mean(after)], [y, y], color="0.7", zorder=1)
            axes.scatter(
                before, [y] * len(before), facecolors="none", edgecolors="C0", label="before" if y == 0 else None
            )
            axes.scatter(after, [y] * len(after), color="C1", label="after one step" if y == 0 else None)
        axes.set(xlabel="MAE, years" if metric == "mae" else "accuracy at targets", title=setting.replace("_", " "))
        axes.set_yticks(range(len(shown)), list(reversed(shown)))
        axes.grid(alpha=0.3, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
