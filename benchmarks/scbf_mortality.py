"""Death in hospital from medications at real hospitals: SCBF, SCBFwP and their baselines, through the real wire.

    python benchmarks/scbf_mortality.py ../shared/data [--seeds 3] [--only eicu]

Cohorts: ``eicu`` (eICU demo, first-day medications, five regions), ``diabetes-iid`` (Diabetes 130-US, five equal sites)
and ``diabetes-age`` (the same by age band). AUC and average precision are of the global model on the test stays of all
sites together, after every round. Writes the tables of ``docs/results/scbf.md`` and ``docs/images/scbf_convergence.png``.
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
from flare_sparse.cli.sites import simulated_sites
from flare_sparse.config import load_config
from flare_sparse.exchange import Update
from flare_sparse.federation import RoundRecord
from flare_sparse.local.run import run_locally
from flare_sparse.task import Examples
from flare_sparse.training import Site
from flare_sparse.wire.ledger import Ledger

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "app_configs" / "scbf_mortality.yaml"
METHODS = {
    "FedAvg": "name: fedavg",
    "FedAvg, server step x 5": "name: fedavg, server_lr: 5",
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
    """A data set, how it is cut into sites, and how long it is trained."""

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
    """One method on one cohort with one seed."""

    curve: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    uploaded: float = 0.0
    megabytes_up: float = 0.0
    megabytes_down: float = 0.0


class Judged:
    """A method whose global model is judged on all test stays together after every round of training."""

    def __init__(self, assembly: Assembly, pooled: Site, curve: list[dict[str, float]]):
        self._method, self._pooled, self._curve = assembly.method, pooled, curve

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def learn(self, state: Any, updates: Sequence[Update]) -> Any:
        after = self._method.learn(state, updates)
        if after.round > state.round:
            weights: Tensor = self._method.model(after).to_vector()
            self._curve.append(self._pooled.evaluate(weights))
        return after


def run(cohort: Cohort, data: Path, method: str, seed: int) -> Run:
    """Run one method in this process."""
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
        where = simulated_sites(config, assembly.task, Path(folder))
    loaded = {name: assembly.task.load(place, seed) for name, place in where.items()}
    sites = {name: open_site(assembly, place) for name, place in where.items()}
    everyone = Examples(next(iter(loaded.values())).train, ConcatDataset([e.test for e in loaded.values()]))
    pooled = Site("pooled", assembly.task, everyone, assembly.layout, seed)
    result, ledger = Run(), Ledger()

    def committed(record: RoundRecord) -> None:
        result.seconds += record.seconds

    judged: Any = Judged(assembly, pooled, result.curve)
    run_locally(judged, assembly.weights, sites, assembly.task.metric, on_round=committed, ledger=ledger)
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
                found = run(COHORTS[name], arguments.data.resolve(), method, seed)
                results[name][label].append(found)
                print(f"{name}, seed {seed}, {label}: {found.curve[-1].get('auc_roc', float('nan')):.3f}", flush=True)
    text = "\n".join(table(COHORTS[name], runs) for name, runs in results.items())
    print(text)
    if not arguments.only:
        page = ROOT / "docs" / "results" / "scbf.md"
        findings = page.read_text().partition("\n## ")[0]  # what was made of the figures is written by hand
        page.write_text(f"{findings}\n{text}")
        plot(results, ROOT / "docs" / "images" / "scbf_convergence.png")
    return 0


def table(cohort: Cohort, runs: dict[str, list[Run]]) -> str:
    """Markdown: mean and standard deviation over the seeds."""
    middle, seeds = cohort.rounds // 3, len(next(iter(runs.values())))
    columns = ["", "AUC-ROC", f"after round {middle}", "AUC-PR", "calibration error", "parameters uploaded"]
    lines = [
        f"## {cohort.title}",
        "",
        f"{cohort.rounds} rounds of {cohort.epochs} local epochs, SGD 0.01, batches of 32. {seeds} seeds: mean ± standard",
        "deviation of the model after the last round, all test stays together.",
        "",
        f"| {' | '.join([*columns, 'MB up', 'MB down', 'seconds'])} |",
        "| --- |" + " --- |" * 8,
    ]
    for label, found in runs.items():
        last = [one.curve[-1] for one in found]
        cells = [
            spread([figures["auc_roc"] for figures in last]),
            spread([one.curve[middle - 1]["auc_roc"] for one in found]),
            spread([figures["auc_pr"] for figures in last]),
            spread([figures["calibration_error"] for figures in last]),
            f"{fmean(one.uploaded for one in found):.0%}",
            f"{fmean(one.megabytes_up for one in found):.1f}",
            f"{fmean(one.megabytes_down for one in found):.1f}",
            f"{fmean(one.seconds for one in found):.0f}",
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float]) -> str:
    """Mean and, of several values, standard deviation."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def plot(results: dict[str, dict[str, list[Run]]], path: Path) -> None:
    """AUC-ROC by round, mean over the seeds."""
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
