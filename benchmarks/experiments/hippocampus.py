"""Dice and HD95 of the hippocampus by method and sparsity: where sparsity begins to cost.

Four sites (A, B cut in two, C) of the public data set of docs/segmentation.md train
`app_configs/fedavg_hippocampus.yaml` with every method, sparsity, seed and fold; beside them the pooled data of all
sites and each site alone.

    python benchmarks/experiments/hippocampus.py ../shared/data/hippocampus --out hippocampus.jsonl [--seeds 3]
        [--folds 5] [--rounds 12] [--epochs 1] [--sparsities 0.8 0.9 0.95 0.98] [--rows fedavg pooled]

Each finished run is a line of the file, and a second call goes on with the runs that are missing. The table shows means
over the runs of a row, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from torch.utils.data import ConcatDataset

from flare_sparse.assemble import Assembly, assemble, open_site
from flare_sparse.cli.sites import prepare_site_data
from flare_sparse.config import RunConfig, load_config
from flare_sparse.local.run import run_locally
from flare_sparse.mask import Mask
from flare_sparse.runs.folder import sum_traffic
from flare_sparse.seeds import limit_threads
from flare_sparse.task import Examples
from flare_sparse.training import Site

CONFIG = Path(__file__).parents[2] / "app_configs" / "fedavg_hippocampus.yaml"
SPARSE = ("neurosfl", "fedsparsify", "topk_ef")
DENSE = ("fedavg", "pooled", "local_only")


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        row: method, or ``pooled``.
        sparsity: share of the entries that is off, or, for ``topk_ef``, that is not sent.
        seed: seed of the run.
        fold: fold for testing, from 1.
        folds: number of folds.
        rounds: rounds of the run.
        epochs: passes over the training cases in a round.
    """

    row: str
    sparsity: float
    seed: int
    fold: int
    folds: int
    rounds: int
    epochs: int

    def load_config(self, data: Path) -> RunConfig:
        """Return the configuration of the run."""
        base = load_config(CONFIG)
        training = base.method.config.training.model_dump(mode="json") | {"epochs": self.epochs}
        method: dict[str, Any] = {"rounds": self.rounds, "training": training}
        method["name"] = "fedavg" if self.row == "pooled" else self.row
        if self.row in ("neurosfl", "fedsparsify"):
            method["sparsity"] = self.sparsity
        elif self.row == "topk_ef":
            method["fraction"] = round(1 - self.sparsity, 6)
        overrides = [f"method={json.dumps(method)}", f"seed={self.seed}", f"simulator.data.path={data.resolve()}"]
        if self.folds > 1:
            overrides += [f"task.split.folds={self.folds}", f"task.split.fold={self.fold}"]
        return load_config(CONFIG, overrides)


def run_setting(setting: Setting, data: Path) -> dict[str, Any]:
    """Run one setting and return its line: metrics by site, bytes and seconds."""
    config, start = setting.load_config(data), time.monotonic()
    assembly = assemble(config)
    sites = {name: open_site(assembly, site) for name, site in prepare_site_data(config, assembly.task, data).items()}
    if setting.row == "pooled":
        metrics, sent = evaluate_pooled(assembly, sites, setting), 0
    else:
        outcome, ledger = run_locally(assembly.method, assembly.weights, sites, assembly.task.metric)
        metrics = {site: dict(values) for site, values in outcome.evaluation.sites.items()}
        sent = sum(int(part["payload_bytes"]) for part in sum_traffic(ledger).values())
    return {**asdict(setting), "sites": metrics, "bytes": sent, "seconds": round(time.monotonic() - start, 1)}


def evaluate_pooled(assembly: Assembly, sites: dict[str, Site], setting: Setting) -> dict[str, dict[str, float]]:
    """Train on the training cases of all sites together; return the metrics on each site's test cases."""
    pooled = Examples(
        ConcatDataset([site.examples.train for site in sites.values()]),
        ConcatDataset([site.examples.test for site in sites.values()]),
    )
    site = Site("pooled", assembly.task, pooled, assembly.layout, setting.seed)
    weights, training, trainable = assembly.weights, assembly.method.config.training, Mask.full(assembly.layout.size)
    with limit_threads(1):
        for t in range(1, setting.rounds + 1):
            weights = site.train(weights, trainable, training.resolve_schedule(t, setting.rounds), t)
    return {name: site.evaluate(weights) for name, site in sites.items()}


def list_settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Yield the settings, seed by seed, so that a run that is cut short has every row."""
    rows = [(row, 0.0) for row in DENSE] + [(row, sparsity) for row in SPARSE for sparsity in options.sparsities]
    for seed in range(1, options.seeds + 1):
        for fold in range(1, options.folds + 1):
            for row, sparsity in rows:
                if not options.rows or row in options.rows:
                    yield Setting(row, sparsity, seed, fold, options.folds, options.rounds, options.epochs)


def average(line: dict[str, Any], metric: str) -> float:
    """Return a metric over all test cases of a run."""
    counts = {site: values["test_examples"] for site, values in line["sites"].items()}
    return sum(line["sites"][site][metric] * count for site, count in counts.items()) / sum(counts.values())


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print Dice, HD95 and bytes of every row, and Dice by site."""
    sites = sorted({site for line in lines for site in line["sites"]})
    print("| row | sparsity | runs | Dice | HD95 (mm) | " + " | ".join(sites) + " | MB | s |")
    print("| --- | --- | --- | --- | --- | " + " | ".join("---" for _ in sites) + " | --- | --- |")
    rows = dict.fromkeys((line["row"], line["sparsity"]) for line in lines)
    for row, sparsity in rows:
        runs = [line for line in lines if (line["row"], line["sparsity"]) == (row, sparsity)]
        dice, hd95 = ([average(line, metric) for line in runs] for metric in ("dice", "hd95"))
        by_site = [f"{mean(line['sites'][site]['dice'] for line in runs):.3f}" for site in sites]
        print(
            f"| {row} | {sparsity:.0%} | {len(runs)} | {mean(dice):.3f} ({min(dice):.3f} to {max(dice):.3f}) | "
            f"{mean(hd95):.2f} | {' | '.join(by_site)} | {mean(line['bytes'] for line in runs) / 1e6:.1f} | "
            f"{mean(line['seconds'] for line in runs):.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.8, 0.9, 0.95, 0.98])
    parser.add_argument("--rows", nargs="+", choices=[*DENSE, *SPARSE])
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.is_file() else []
    wanted = list(list_settings(options))
    for setting in wanted:
        if not any(asdict(setting).items() <= line.items() for line in lines):
            lines.append(run_setting(setting, options.data))
            with options.out.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print_table([line for line in lines if any(asdict(setting).items() <= line.items() for setting in wanted)])


if __name__ == "__main__":
    main()
