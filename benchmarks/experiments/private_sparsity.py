r"""Error of private training by epsilon and sparsity: does training fewer entries buy accuracy at equal epsilon?

    python benchmarks/experiments/private_sparsity.py ../shared/data [--cohorts table] [--seeds 1 2 3] \
        [--out runs/private_sparsity]

``table``: age from FreeSurfer tables of three cohorts (2,631 subjects), at four sites of equal size. ``volume``: age
from brains at 12 mm (252 subjects), at two sites. Dense training, a random mask with ERK layers, and FedSparsify, each
at epsilon 1, 3 and 8 and without privacy. Each run is one process without FLARE and uses the real wire. Finished runs
are not repeated; ``--report`` prints the tables of what is there.

The noise of these runs is derived from their seed, so that the figures can be repeated. At a site it is secret.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy.stats import t as student

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import prepare_site_data
from flare_sparse.privacy.dp.account import PrivacyAccount
from flare_sparse.results.runs.local import run_assembly

CONFIG = Path(__file__).resolve().parents[2] / "app_configs" / "dp_morphometry_age.yaml"
TABLES = ("destrieux_fcon1000", "destrieux_openneuro", "destrieux_abide1")
EPSILONS = (1.0, 3.0, 8.0, math.inf)
ARMS = {
    "dense": "name: fedavg",
    "random mask, ERK, 90 %": "name: neurosfl, sparsity: 0.9, scores: random, random_layers: erk",
    "random mask, ERK, 98 %": "name: neurosfl, sparsity: 0.98, scores: random, random_layers: erk",
    "FedSparsify, 90 %": "name: fedsparsify, sparsity: 0.9",
    "FedSparsify, 98 %": "name: fedsparsify, sparsity: 0.98",
}
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Cohort:
    """One cohort: sites, rounds and training, the same for all arms; chosen with seed 0, which no table has."""

    rounds: int
    training: str
    overrides: tuple[str, ...]


COHORTS = {
    "table": Cohort(
        20,
        "{epochs: 1, batch_size: 64, optimizer: adam, lr: 5e-3}",
        (
            "task.target_scale=[30, 15]",
            "simulator.sites=4",
            "simulator.data.partition={kind: iid, sizes: uniform, seed: 1}",
        ),
    ),
    "volume": Cohort(
        10,
        "{epochs: 1, batch_size: 32, optimizer: adam, lr: 3e-3}",
        (
            # Standardised inputs would need statistics of all sites, which no budget covers.
            "task={name: brain_age, downsample: 4, normalization: brain_first}",
            "task.model={name: voxel_mlp, standardize: false}",
            "simulator.sites=2",
            "simulator.data.partition={kind: iid, sizes: uniform, seed: 1}",
        ),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with brain_t1/ and brain_morphometry/")
    parser.add_argument("--cohorts", choices=COHORTS, nargs="+", default=list(COHORTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further run after this time")
    parser.add_argument("--out", type=Path, default=Path("runs/private_sparsity"))
    parser.add_argument("--report", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * arguments.minutes
    for name in arguments.cohorts:
        folder = arguments.out / name
        folder.mkdir(parents=True, exist_ok=True)
        for seed in () if arguments.report else arguments.seeds:
            for epsilon in EPSILONS:
                for arm in ARMS:
                    file = folder / f"{arm} {epsilon:g} {seed}.json".replace(" ", "_")
                    if time.monotonic() < end and not file.exists():
                        config = build_config(name, arm, epsilon, seed, arguments)
                        row = {"arm": arm, "epsilon": epsilon, "seed": seed, **run(config)}
                        file.write_text(json.dumps(row, indent=1) + "\n")
                        print(f"{file.stem}: {row['mae']:.3f} years, {row['seconds']:.0f} s", flush=True)
        rows = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        print(format_table([row for row in rows if row["seed"] in arguments.seeds]))
    return 0


def build_config(name: str, arm: str, epsilon: float, seed: int, arguments: argparse.Namespace) -> RunConfig:
    cohort = COHORTS[name]
    path = join_tables(arguments) if name == "table" else (arguments.data / "brain_t1").resolve()
    return load_config(
        CONFIG,
        [
            f"method={{{ARMS[arm]}, rounds: {cohort.rounds}, training: {cohort.training}}}",
            *cohort.overrides,
            *([f"privacy.epsilon={epsilon:g}"] if math.isfinite(epsilon) else ["privacy=null"]),
            f"seed={seed}",
            f"simulator.data.path={path}",
            *arguments.overrides,
        ],
    )


def join_tables(arguments: argparse.Namespace) -> Path:
    """Return the file with the subjects of all three cohorts, which is written once."""
    file = (arguments.out / "destrieux.csv").resolve()
    if not file.is_file():
        folder = arguments.data / "brain_morphometry"
        tables = [pd.read_csv(folder / f"{name}.csv.gz").assign(cohort=name) for name in TABLES]
        joined = pd.concat(tables, join="inner")
        joined["subject"] = joined["cohort"] + "-" + joined["subject"].astype(str)
        joined.drop(columns="cohort").to_csv(file, index=False)
    return file


def run(config: RunConfig) -> dict[str, Any]:
    """Return the figures of one run."""
    began = time.monotonic()
    assembly = assemble(config)
    data = prepare_site_data(config, assembly.task, Path())
    sites = {}
    for name, where in data.items():
        account = PrivacyAccount()
        account.secret = hashlib.sha256(f"{config.seed} {name}".encode()).digest()
        sites[name] = open_site(assembly, where, account)
    outcome, _ = run_assembly(config, assembly, sites)
    first = next(iter(sites.values()))
    return {
        "mae": outcome.evaluation.overall["mae"],
        "mae_of_mean": compute_error_of_mean(assembly, data),
        "live": int(outcome.mask.bits.sum()),
        "subjects": first.trainer.examples.count_train_subjects() if config.privacy else first.num_examples,
        "noise_multiplier": first.trainer.mechanism.noise_multiplier if first.trainer.mechanism else None,
        "spent": {
            name: site.trainer.mechanism.compute_spent() for name, site in sites.items() if site.trainer.mechanism
        },
        "seconds": time.monotonic() - began,
    }


def compute_error_of_mean(assembly: Any, data: Any) -> float:
    """Return the mean absolute error of the mean age of all training subjects."""
    examples = [assembly.task.load(where, assembly.method.seed) for where in data.values()]
    train, test = (
        torch.cat([torch.stack([part[i][1] for i in range(len(part))]).flatten() for part in parts])
        for parts in ([own.train for own in examples], [own.test for own in examples])
    )
    return float((test - train.mean()).abs().mean())


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return errors, and differences to dense training at the same epsilon and to the mean age.

    All figures are means over the seeds with 95 % intervals.
    """
    errors = {(row["arm"], row["epsilon"], row["seed"]): row["mae"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    lines = [f"{len(rows)} runs, seeds {seeds}"]
    by_seed = {row["seed"]: row["mae_of_mean"] for row in rows}
    if rows:
        lines.append(f"error of the mean age: {format_mean(list(by_seed.values()))}")
    for title, compute in (
        ("MAE", lambda arm, epsilon, seed: errors.get((arm, epsilon, seed))),
        ("minus dense", lambda *key: subtract(errors.get(key), errors.get(("dense", *key[1:])))),
        ("minus mean age", lambda *key: subtract(errors.get(key), by_seed.get(key[2]))),
    ):
        lines += ["", f"| {title} | entries | " + " | ".join(f"epsilon {e:g}" for e in EPSILONS) + " |"]
        lines.append("| --- " * (len(EPSILONS) + 2) + "|")
        for arm in ARMS:
            live = [row["live"] for row in rows if row["arm"] == arm]
            cells = [[v for seed in seeds if (v := compute(arm, e, seed)) is not None] for e in EPSILONS]
            if live and (arm != "dense" or title != "minus dense"):
                signed = "+" if title != "MAE" else ""
                figures = " | ".join(format_mean(values, signed) for values in cells)
                lines.append(f"| {arm} | {round(statistics.fmean(live)):,} | {figures} |")
    noise = {row["epsilon"]: row["noise_multiplier"] for row in rows if row["noise_multiplier"]}
    lines.append("")
    lines += [f"epsilon {epsilon:g}: noise {sigma:.2f} * clip" for epsilon, sigma in sorted(noise.items())]
    return "\n".join(lines)


def subtract(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


def format_mean(values: list[float], sign: str = "") -> str:
    """Return a mean and its 95 % interval over the seeds by Student's t."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):{sign}.2f}"
    if len(values) < 2:
        return mean
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {half:.2f}"


if __name__ == "__main__":
    sys.exit(main())
