"""Error and bytes of NeuroSFL (90 %) and FedSparsify (95 %) on brain age from T1w volumes, against dense FedAvg.

    python benchmarks/experiments/brain_t1.py ../shared/data/brain_t1 [--rounds 40] [--seed 1] [--out runs/brain_t1]

Five sites in FLARE's simulator: IXI-HH is split at random into four, NSK is the fifth. Writes
``docs/results/brain_t1.md`` and ``docs/images/result.png`` (error and bytes by round). With one seed the figures are an
indication, no comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console

from flare_sparse.cli.environments import run_in_simulator
from flare_sparse.config import load_config
from flare_sparse.runs.progress import format_bytes

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "app_configs" / "neurosfl_brain_t1.yaml"
RUNS = {
    "FedAvg (dense)": ["method={name: fedavg}"],
    "NeuroSFL 90 %": ["method={name: neurosfl, sparsity: 0.9}"],
    "FedSparsify 95 %": ["method={name: fedsparsify, sparsity: 0.95}"],
}
TRAINING = "{epochs: 2, batch_size: 8, optimizer: adam, lr: 1e-3}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the BIDS data sets IXI-HH and NSK")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/brain_t1"))
    arguments = parser.parse_args()
    console = Console(highlight=False)
    results: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for label, overrides in RUNS.items():
        config = load_config(
            CONFIG,
            [
                *overrides,
                f"method.rounds={arguments.rounds}",
                f"method.training={TRAINING}",
                f"seed={arguments.seed}",
                f"simulator.data.path={arguments.data.resolve()}",
            ],
        )
        out = (arguments.out / config.method.name).resolve()
        summary = run_in_simulator(config, CONFIG, out, console)
        results[label] = summary, [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    text = format_table(results, arguments)
    console.print(text)
    (ROOT / "docs" / "results").mkdir(exist_ok=True)
    (ROOT / "docs" / "results" / "brain_t1.md").write_text(text)
    plot_errors(results, ROOT / "docs" / "images" / "result.png")
    return 0


def format_table(results: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Return Markdown: error per site and overall, bytes, seconds."""
    first = next(iter(results.values()))[0]
    sites = sorted(first["final"]["sites"])
    tests = {site: first["final"]["sites"][site]["test_examples"] for site in sites}
    lines = [
        "# Brain age on real brains, five sites",
        "",
        (
            f"`python benchmarks/experiments/brain_t1.py ../shared/data/brain_t1 --rounds {arguments.rounds} "
            f"--seed {arguments.seed}`"
        ),
        "",
        "IXI-HH (180 subjects) is split at random into four sites, NSK (72 subjects) is the fifth; 6 mm volumes.",
        "Mean absolute error of the final model in years on each site's test subjects; columns name the number of test",
        "subjects. One seed: an indication, no comparison.",
        "",
        "| | "
        + " | ".join(f"{site.removeprefix('IXI-')} ({tests[site]:.0f})" for site in sites)
        + " | all | best round | sent | "
        "dense FedAvg | less | seconds |",
        "| --- |" + " --- |" * (len(sites) + 6),
    ]
    for label, (summary, _) in results.items():
        figures = [summary["final"]["sites"][site]["mae"] for site in sites]
        sent = sum(summary["traffic"][way]["payload_bytes"] for way in ("down", "up"))
        dense = sum(summary["traffic"][way]["dense_bytes"] for way in ("down", "up"))
        best = summary["best"]
        cells = [
            *(f"{value:.1f}" for value in figures),
            f"**{summary['final']['metrics']['mae']:.2f}**",
            # Without validation examples no round is the best one.
            f"{best['metrics']['mae']:.2f} ({best['round']})" if best["metrics"] else "-",
            format_bytes(sent),
            format_bytes(dense),
            f"{dense / sent:.1f}x",
            f"{summary['seconds']:.0f}",
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot_errors(results: dict[str, Any], path: Path) -> None:
    """Draw the error by round and by bytes sent."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for label, (_, lines) in results.items():
        evaluated = [line for line in lines if "mae" in line["metrics"]]
        sent, total = {}, 0
        for line in lines:
            sent[line["sequence"]] = total
            total += line["bytes_up"] + line["bytes_down"]
        errors = [line["metrics"]["mae"] for line in evaluated]
        left.plot([line["evaluated_round"] for line in evaluated], errors, label=label)
        right.plot([sent[line["sequence"]] / 1e6 for line in evaluated], errors, label=label)
    left.set(xlabel="rounds", ylabel="test error: MAE, years")
    right.set(xlabel="MB sent so far, all sites, both ways", xscale="log")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Brain age from T1w MRI, five sites, real data: error and bytes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
