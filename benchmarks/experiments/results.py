"""Error and bytes of NeuroSFL, FedSparsify and their baselines on real brains, by sparsity, over seeds.

    python benchmarks/experiments/results.py ../shared/data --seeds 1 2 3 [--only brain_t1] [--out runs/results]

Three experiments: brain age from T1w volumes at five sites (IXI-HH split at random into four, NSK is the fifth);
FedSparsify's environments at eight sites (equal sizes with mixed ages, skewed sizes with one range of ages per site);
age and sex from FreeSurfer tables at 23 real scan sites. Each run is one process without FLARE, uses the real wire and
ends with the same bits as a FLARE job. Each run writes one JSON file: finished runs are not repeated, several processes
may share the work, and an interrupted run starts again. ``--docs`` updates docs/results.md and its plot.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results_report import update_docs
from torch.utils.data import ConcatDataset

from flare_sparse.assemble import Assembly, assemble, build_rules
from flare_sparse.cli.sites import prepare_site_data
from flare_sparse.config import RunConfig, load_config
from flare_sparse.federation import Outcome
from flare_sparse.local.pooled import train_pooled
from flare_sparse.local.run import run_locally
from flare_sparse.mask import Mask
from flare_sparse.task import Examples
from flare_sparse.training import Site
from flare_sparse.wire.ledger import Ledger

CONFIGS = Path(__file__).resolve().parents[2] / "app_configs"
BRAINS = "{epochs: 2, batch_size: 8, optimizer: adam, lr: 1e-3}"
TABLES = "{epochs: 2, batch_size: 16, optimizer: adam, lr: 1e-3}"


@dataclass(frozen=True)
class Arm:
    """One line of a table: settings of a method; ``{s}`` stands for the sparsity, ``{live}`` for ``1 - s``."""

    label: str
    method: str
    sparsities: tuple[float, ...] = (0.0,)
    wire: str = "float32"


@dataclass(frozen=True)
class Experiment:
    """One experiment: arms, and the configuration file that names sites and data."""

    config: str
    arms: tuple[Arm, ...]
    rounds: int
    training: str
    overrides: tuple[str, ...]

    def list_runs(self) -> Iterator[tuple[Arm, float]]:
        yield from ((arm, s) for arm in self.arms for s in arm.sparsities)


LEVELS = (0.98, 0.9, 0.5, 0.95, 0.8)
"""The levels where methods differ most come first, so that an interrupted experiment shows them."""

DENSE = (
    Arm("FedAvg", "name: fedavg"),
    Arm("local only", "name: local_only"),
    Arm("pooled", "name: fedavg"),
    Arm("FedAvg, bfloat16", "name: fedavg", wire="bfloat16"),
    Arm("FedAvg-FT", "name: fedavg_ft"),
)
NEUROSFL = "name: neurosfl, sparsity: {s}, scores: "
SPARSE = (
    Arm("NeuroSFL (SNIP)", NEUROSFL + "snip", LEVELS),
    Arm("random mask", NEUROSFL + "random", LEVELS),
    Arm("random mask, ERK", NEUROSFL + "random, random_layers: erk", LEVELS),
    Arm("iterative SNIP, 10 minibatches", NEUROSFL + "iter_snip", LEVELS),
    Arm("iterative SNIP, progressive", NEUROSFL + "iter_snip, iter_snip: progressive", LEVELS),
    Arm("weighted SNIP", NEUROSFL + "weighted_snip", LEVELS),
    Arm("IndividualSNIP", NEUROSFL + "individual_snip", LEVELS),
    Arm("IndividualSNIP, one random site's", NEUROSFL + "individual_snip, random_site: true", LEVELS),
    Arm("DisPFL", "name: dispfl, sparsity: {s}", LEVELS),
    Arm("top-k with error feedback", "name: topk_ef, fraction: {live}", LEVELS),
)
FEDSPARSIFY = (
    Arm("FedAvg", "name: fedavg"),
    Arm("FedSparsify", "name: fedsparsify, sparsity: {s}", (0.85, 0.9, 0.95, 0.99)),
)
SCANNERS = (
    *DENSE[:3],
    Arm("NeuroSFL (SNIP)", NEUROSFL + "snip", (0.9, 0.98)),
    Arm("random mask", NEUROSFL + "random", (0.9, 0.98)),
    Arm("FedSparsify", "name: fedsparsify, sparsity: {s}", (0.9, 0.98)),
    Arm("top-k with error feedback", "name: topk_ef, fraction: {live}", (0.9, 0.98)),
)


def split_into_eight(partition: str) -> tuple[str, ...]:
    return ("simulator.sites=8", f"simulator.data.partition={partition}")


EXPERIMENTS = {
    "brain_t1": Experiment("neurosfl_brain_t1", (*DENSE, *SPARSE), 15, BRAINS, ()),
    "uniform_iid": Experiment(
        "neurosfl_brain_t1", FEDSPARSIFY, 15, BRAINS, split_into_eight("{kind: iid, sizes: uniform, seed: 1}")
    ),
    "skewed_noniid": Experiment(
        "neurosfl_brain_t1", FEDSPARSIFY, 15, BRAINS, split_into_eight("{kind: age, sizes: skewed}")
    ),
    "scanners_age": Experiment("neurosfl_morphometry_age", SCANNERS, 100, TABLES, ("simulator.sites=23",)),
    "scanners_sex": Experiment(
        "neurosfl_morphometry_age", SCANNERS, 100, TABLES, ("simulator.sites=23", "task={name: morphometry_sex}")
    ),
}
FILES = {"neurosfl_brain_t1": "brain_t1", "neurosfl_morphometry_age": "brain_morphometry/destrieux_fcon1000.csv.gz"}


def build_config(experiment: Experiment, arm: Arm, sparsity: float, seed: int, data: Path) -> RunConfig:
    """Return the configuration of one run, from the published file."""
    method = arm.method.format(s=sparsity, live=round(1 - sparsity, 4))
    return load_config(
        CONFIGS / f"{experiment.config}.yaml",
        [
            f"method={{{method}, rounds: {experiment.rounds}, training: {experiment.training}}}",
            f"wire.values={arm.wire}",
            f"seed={seed}",
            f"simulator.data.path={(data / FILES[experiment.config]).resolve()}",
            *experiment.overrides,
        ],
    )


def run(experiment: Experiment, arm: Arm, sparsity: float, seed: int, data: Path) -> dict[str, Any]:
    """Return the figures of one run: errors of the final model, bytes, live entries of each layer."""
    config = build_config(experiment, arm, sparsity, seed, data)
    assembly = assemble(config)
    site_data = prepare_site_data(config, assembly.task, Path())
    examples = {name: assembly.task.load(where, seed) for name, where in site_data.items()}
    sites = {name: Site(name, assembly.task, own, assembly.layout, seed) for name, own in examples.items()}
    began = time.monotonic()
    is_pooled = arm.label == "pooled"
    figures = run_pooled(assembly, sites, examples) if is_pooled else run_federated(config, assembly, sites)
    metric = assembly.task.metric
    facts = {"label": arm.label, "sparsity": sparsity, "seed": seed, "rounds": experiment.rounds}
    names = {"metric": metric.name, "unit": metric.unit, "mode": metric.mode}
    return {**facts, **names, **figures, "seconds": time.monotonic() - began}


def run_rounds(config: RunConfig, assembly: Assembly, sites: dict[str, Site]) -> tuple[Outcome, Ledger]:
    """Run all rounds in this process over the real messages, without checkpoints."""
    return run_locally(
        assembly.method,
        assembly.weights,
        sites,
        assembly.task.metric,
        values=config.wire.values,
        run=assembly.run_id,
        rules=build_rules(config),
    )


def run_federated(config: RunConfig, assembly: Assembly, sites: dict[str, Site]) -> dict[str, Any]:
    outcome, ledger = run_rounds(config, assembly, sites)
    return {
        "overall": outcome.evaluation.overall,
        "sites": outcome.evaluation.sites,
        "curve": [record.evaluation.overall.get(assembly.task.metric.name) for record in outcome.rounds],
        "bytes": sum(line.payload_bytes for line in ledger.lines),
        "dense_bytes": sum(line.dense_bytes for line in ledger.lines),
        "live": count_live(assembly, outcome.mask),
    }


def count_live(assembly: Assembly, mask: Mask) -> dict[str, list[int]]:
    """Return the numbers of live and of all entries of every tensor with two or more dimensions."""
    parts = assembly.layout.unflatten(mask.bits)
    return {name: [int(part.sum()), part.numel()] for name, part in parts.items() if part.dim() > 1}


def run_pooled(assembly: Assembly, sites: dict[str, Site], examples: dict[str, Examples]) -> dict[str, Any]:
    """Train on the examples of all sites together and evaluate at each site: the upper bound."""
    pooled = ConcatDataset([own.train for own in examples.values()])
    method, first = assembly.method, next(iter(examples.values()))
    site = Site("pooled", assembly.task, Examples(pooled, first.test), assembly.layout, method.seed)
    weights = train_pooled(site, assembly.weights, method.config.training, method.config.rounds)
    metrics = {name: own.evaluate(weights) for name, own in sites.items()}
    total = sum(figures["test_examples"] for figures in metrics.values())
    name = assembly.task.metric.name
    overall = sum(figures[name] * figures["test_examples"] for figures in metrics.values()) / total
    return {"overall": {name: overall, "test_examples": total}, "sites": metrics, "bytes": 0, "dense_bytes": 0}


@contextmanager
def claim(file: Path) -> Iterator[bool]:
    """Yield whether this process is to write the file: it is missing and no other process writes it.

    The lock ends with its process, so that a killed run can start again.
    """
    with file.with_suffix(".claimed").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield not file.exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with brain_t1/ and brain_morphometry/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=EXPERIMENTS, nargs="+", default=list(EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--docs", action="store_true", help="update docs/results.md from the files in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        for name in arguments.only:
            (arguments.out / name).mkdir(parents=True, exist_ok=True)
            for arm, sparsity in EXPERIMENTS[name].list_runs():
                file = arguments.out / name / f"{arm.label} {sparsity:g} {seed}.json".replace(" ", "_")
                with claim(file) as is_claimed:
                    if not is_claimed:
                        continue
                    row = run(EXPERIMENTS[name], arm, sparsity, seed, arguments.data)
                    part = file.with_suffix(".new")
                    part.write_text(json.dumps(row, indent=1) + "\n")
                    part.replace(file)
                figure = row["overall"][row["metric"]]
                print(f"{name} seed {seed} {arm.label} {sparsity:g}: {figure:.3f}, {row['seconds']:.0f} s", flush=True)
    if arguments.docs:
        update_docs(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
