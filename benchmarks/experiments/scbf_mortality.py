"""AUC and bytes of SCBF, SCBFwP and their baselines on death in hospital, predicted from medications.

    python benchmarks/experiments/scbf_mortality.py ../shared/data [--seeds 3] [--only eicu]

Cohorts: ``eicu`` (eICU demo, first-day medications, five regions), ``diabetes-iid`` (Diabetes 130-US, five equal sites)
and ``diabetes-age`` (the same by age band). The global model is evaluated on the test stays of all sites together after
every round. All sites run in one process and use the real wire. Writes the tables of ``docs/results/scbf.md`` and
``docs/images/scbf_convergence.png``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from flare_sparse.assemble import Assembly, assemble, open_site
from flare_sparse.cli.sites import prepare_site_data
from flare_sparse.config import load_config
from flare_sparse.exchange import Update
from flare_sparse.federation import RoundRecord
from flare_sparse.local.run import run_locally
from flare_sparse.task import Examples
from flare_sparse.training import Site
from flare_sparse.wire.ledger import Ledger

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "app_configs" / "scbf_mortality.yaml"
METHODS = {
    "FedAvg": "name: fedavg",
    "FedAvg, server step x 5": "name: fedavg, server: {lr: 5}",
    "SCBF 10 %": "name: scbf, rate: 0.1",
    "SCBF 30 %": "name: scbf, rate: 0.3",
    "SCBF 100 %": "name: scbf, rate: 1",
    "SCBF 30 %, mean": "name: scbf, rate: 0.3, aggregation: mean",
    "SCBF budget 10 %": "name: scbf, budget: 0.1",
    "SCBFwP 30 %, 47 % pruned": "name: scbfwp, rate: 0.3, prunings: 6",
    "FAwP, 47 % pruned": "name: fawp, prunings: 6",
    "DSSGD 30 %": "name: dssgd, rate: 0.3",
}
DIABETES = (
    "{name: mortality, medications: 23, levels: 3, codes: meds, outcome: expired, stay: null, only: first_encounter}"
)


@dataclass(frozen=True)
class Cohort:
    """A data set, its partition into sites, and the length of training."""

    title: str
    file: str
    partition: str
    rounds: int
    epochs: int
    overrides: tuple[str, ...] = ()


COHORTS = {
    "eicu": Cohort(
        "eICU demo: 1,834 stays with medications, 420 codes, five regions",
        "eicu_demo/mortality.npz",
        "kind: natural, column: region",
        60,
        5,
    ),
    "diabetes-iid": Cohort(
        "Diabetes 130-US: 71,518 first stays, 23 medicines at three doses, five equal sites",
        "diabetes130/mortality.npz",
        "kind: iid",
        40,
        1,
        (f"task={DIABETES}", "simulator.sites=5"),
    ),
    "diabetes-age": Cohort(
        "Diabetes 130-US by age band: ten sites, 154 to 18,210 stays",
        "diabetes130/mortality.npz",
        "kind: natural, column: age_band",
        40,
        1,
        (f"task={DIABETES}",),
    ),
}


@dataclass
class Run:
    """Figures of one method on one cohort with one seed."""

    curve: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    uploaded: float = 0.0
    megabytes_up: float = 0.0
    megabytes_down: float = 0.0


class EvaluatedMethod:
    """A method whose global model is evaluated on all test stays together after every round of training."""

    def __init__(self, assembly: Assembly, pooled: Site, curve: list[dict[str, float]]):
        self._method, self._pooled, self._curve = assembly.method, pooled, curve

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def learn(self, state: Any, updates: Sequence[Update]) -> Any:
        new_state = self._method.learn(state, updates)
        if new_state.round > state.round:
            weights: Tensor = self._method.model(new_state).to_vector()
            self._curve.append(self._pooled.evaluate(weights))
        return new_state


def run(cohort: Cohort, data: Path, method: str, seed: int) -> Run:
    """Run one method in this process and return its figures."""
    training = f"training: {{epochs: {cohort.epochs}, batch_size: 32, optimizer: sgd, lr: 0.01}}"
    config = load_config(
        CONFIG,
        [
            f"simulator.data={{path: {data / cohort.file}, partition: {{{cohort.partition}}}}}",
            f"method={{{method}, rounds: {cohort.rounds}, {training}}}",
            f"seed={seed}",
            *cohort.overrides,
        ],
    )
    assembly = assemble(config)
    with tempfile.TemporaryDirectory() as folder:
        site_data = prepare_site_data(config, assembly.task, Path(folder))
    examples = {name: assembly.task.load(own, seed) for name, own in site_data.items()}
    sites = {name: open_site(assembly, own) for name, own in site_data.items()}
    pooled_tests = ConcatDataset([own.test for own in examples.values()])
    pooled_examples = Examples(next(iter(examples.values())).train, pooled_tests)
    pooled = Site("pooled", assembly.task, pooled_examples, assembly.layout, seed)
    result, ledger = Run(), Ledger()

    def add_seconds(record: RoundRecord) -> None:
        result.seconds += record.seconds

    method_with_curve: Any = EvaluatedMethod(assembly, pooled, result.curve)
    run_locally(method_with_curve, assembly.weights, sites, assembly.task.metric, on_round=add_seconds, ledger=ledger)
    up = [line for line in ledger.lines if line.direction == "up" and line.kind == "train"]
    result.uploaded = sum(line.scalars_sent for line in up) / (len(up) * assembly.layout.size)
    result.megabytes_up = sum(line.payload_bytes for line in ledger.lines if line.direction == "up") / 1e6
    result.megabytes_down = sum(line.payload_bytes for line in ledger.lines if line.direction == "down") / 1e6
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with eicu_demo and diabetes130")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=COHORTS, help="one cohort, printed and not written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[Run]]] = {}
    for name in [arguments.only] if arguments.only else COHORTS:
        results[name] = {label: [] for label in METHODS}
        for seed in range(1, arguments.seeds + 1):
            for label, method in METHODS.items():
                result = run(COHORTS[name], arguments.data.resolve(), method, seed)
                results[name][label].append(result)
                print(f"{name}, seed {seed}, {label}: {result.curve[-1].get('auc_roc', float('nan')):.3f}", flush=True)
    text = "\n".join(format_table(COHORTS[name], runs) for name, runs in results.items())
    print(text)
    if not arguments.only:
        page = ROOT / "docs" / "results" / "scbf.md"
        # The findings above the tables are written by hand.
        findings = page.read_text().partition("\n## ")[0]
        page.write_text(f"{findings}\n{text}")
        plot_auc(results, ROOT / "docs" / "images" / "scbf_convergence.png")
    return 0


def format_table(cohort: Cohort, runs: dict[str, list[Run]]) -> str:
    """Return Markdown: means and standard deviations over the seeds."""
    middle, seeds = cohort.rounds // 3, len(next(iter(runs.values())))
    columns = ["", "AUC-ROC", f"after round {middle}", "AUC-PR", "calibration error", "parameters uploaded"]
    lines = [
        f"## {cohort.title}",
        "",
        f"{cohort.rounds} rounds of {cohort.epochs} local epochs, SGD 0.01, batches of 32. {seeds} seeds: mean ±",
        "standard deviation of the final model, on all test stays together.",
        "",
        f"| {' | '.join([*columns, 'MB up', 'MB down', 'seconds'])} |",
        "| --- |" + " --- |" * 8,
    ]
    for label, own in runs.items():
        last = [one.curve[-1] for one in own]
        cells = [
            format_spread([figures["auc_roc"] for figures in last]),
            format_spread([one.curve[middle - 1]["auc_roc"] for one in own]),
            format_spread([figures["auc_pr"] for figures in last]),
            format_spread([figures["calibration_error"] for figures in last]),
            f"{fmean(one.uploaded for one in own):.0%}",
            f"{fmean(one.megabytes_up for one in own):.1f}",
            f"{fmean(one.megabytes_down for one in own):.1f}",
            f"{fmean(one.seconds for one in own):.0f}",
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def format_spread(values: Sequence[float]) -> str:
    """Return the mean and, with several values, the standard deviation."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def plot_auc(results: dict[str, dict[str, list[Run]]], path: Path) -> None:
    """Draw the AUC-ROC by round, mean over the seeds."""
    figure, axes = plt.subplots(1, len(results), figsize=(4.6 * len(results), 4.2), layout="constrained", squeeze=False)
    for axis, (name, runs) in zip(axes[0], results.items(), strict=True):
        for number, (label, found) in enumerate(runs.items()):
            curves = torch.tensor([[figures["auc_roc"] for figures in one.curve] for one in found])
            style = "--" if label.startswith("FedAvg") else ":" if label.startswith(("FAwP", "DSSGD")) else "-"
            axis.plot(range(1, curves.shape[1] + 1), curves.mean(0), style, color=f"C{number}", label=label, lw=1.6)
        axis.set(title=name, xlabel="round")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("AUC-ROC, all test stays")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle("Death in hospital from medications: AUC by round, mean of the seeds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
