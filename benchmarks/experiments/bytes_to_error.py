"""Bytes that a federation sends until its model reaches a given error: number formats, masks and top-k.

    python benchmarks/experiments/bytes_to_error.py ../shared/data [--only scanners_age] [--seeds 1 2 3] [--out FOLDER]
    python benchmarks/experiments/bytes_to_error.py --report [--docs] [--out FOLDER]

Sites train in turn, in one process, on one core; every message is encoded, decoded and counted. One file per run, in
``--out``: processes share the work, and an interrupted run starts again. ``--report`` prints the tables,
``--docs`` writes them to docs/results/bytes.md.

The error of round t is that of the model that the sites receive in it, averaged over three rounds, since single rounds
are noisy. Its bytes are those of all messages up to these requests. The error to reach is that of FedAvg in bfloat16,
or float32 where bfloat16 is not possible, with the same seed at the end, plus a margin. A format reaches it if it does
so on every seed; the table has the mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from page_tables import write_section
from runs import CONFIGS, claim

from flare_sparse.config.assemble import assemble
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import prepare_site_data
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.training import LocalTask, build_site


@dataclass(frozen=True)
class Experiment:
    """Runs of one configuration file with every method and format.

    Attributes:
        config: name of the file.
        rounds: number of rounds.
        training: settings of local training.
        overrides: other settings.
        methods: keys of ``METHODS``.
        formats: number formats; FedAvg's error in the first one is the error to reach.
        margins: what may be added to that error.
    """

    config: str
    rounds: int
    training: str
    overrides: tuple[str, ...]
    methods: tuple[str, ...]
    formats: tuple[str, ...]
    margins: tuple[float, ...] = (0.5, 0.3, 0.1)


EXPERIMENTS = {
    "brain_t1": Experiment(
        "neurosfl_voxels",
        30,
        "{epochs: 1, batch_size: 16, optimizer: adamw, lr: 1e-3, weight_decay: 1.0, schedule: {kind: cosine}}",
        (),
        ("FedAvg", "SNIP mask 90 %", "top-k 10 %"),
        # The network standardises its inputs, whose statistics bfloat16 would round.
        ("float32", "int2", "int4", "int8"),
    ),
    "scanners_age": Experiment(
        "neurosfl_morphometry_age",
        40,
        "{epochs: 2, batch_size: 16, optimizer: adam, lr: 1e-3}",
        ("simulator.sites=8",),
        ("FedAvg", "random mask 50 %", "top-k 10 %"),
        ("bfloat16", "int2", "int4", "int8", "float32"),
    ),
}
METHODS = {
    "FedAvg": "name: fedavg",
    "SNIP mask 90 %": "name: neurosfl, scores: snip, saliency_batches: null, sparsity: 0.9",
    "random mask 50 %": "name: neurosfl, scores: random, sparsity: 0.5",
    "top-k 10 %": "name: topk_ef, fraction: 0.1",
}
OLD_FORMATS = ("float32", "bfloat16")
DATA = {
    "neurosfl_voxels": "brain_t1",
    "neurosfl_morphometry_age": "brain_morphometry/destrieux_fcon1000.csv.gz",
}


def run(experiment: Experiment, method: str, values: str, seed: int, data: Path) -> dict[str, Any]:
    """Return the error and the bytes of every round of one run."""
    config = load_config(
        CONFIGS / f"{experiment.config}.yaml",
        [
            f"method={{{METHODS[method]}, rounds: {experiment.rounds}, training: {experiment.training}}}",
            f"wire.values={values}",
            f"seed={seed}",
            f"simulator.data.path={(data / DATA[experiment.config]).resolve()}",
            *experiment.overrides,
        ],
    )
    assembly, began = assemble(config), time.monotonic()
    site_data = prepare_site_data(config, assembly.task, Path())
    sites = {
        name: build_site(LocalTask.open(name, assembly.task, assembly.task.load(where, seed), assembly.layout, seed))
        for name, where in site_data.items()
    }
    outcome, ledger = run_assembly(config, assembly, sites)
    requests, updates = defaultdict(int), defaultdict(int)
    for line in ledger.lines:
        (requests if line.direction == "down" else updates)[line.round] += line.payload_bytes
    rounds = [record.round for record in outcome.rounds]
    errors = [record.evaluation.overall.get(assembly.task.metric.name) for record in outcome.rounds]
    sent = [sum(requests[t] for t in requests if t <= n) + sum(updates[t] for t in updates if t < n) for n in rounds]
    return {
        "method": method,
        "values": values,
        "seed": seed,
        "entries": assembly.layout.size,
        "rounds": rounds,
        "errors": errors,
        "bytes": sent,
        "seconds": time.monotonic() - began,
    }


def find_bytes(row: dict[str, Any], target: float) -> int | None:
    """Return the bytes until the mean error of three rounds is at most ``target``; None if it never is."""
    points = [(error, sent) for error, sent in zip(row["errors"], row["bytes"], strict=True) if error is not None]
    for index in range(2, len(points)):
        if mean(error for error, _ in points[index - 2 : index + 1]) <= target:
            return points[index][1]
    return None


def average(sent: list[int | None]) -> float | None:
    """Return the mean; None if a run has no figure."""
    reached = [number for number in sent if number is not None]
    return mean(reached) if len(reached) == len(sent) else None


def report(name: str, rows: list[dict[str, Any]]) -> str:
    """Return the table of an experiment: a row for each method and format.

    In brackets: how many times the fewest bytes of the old formats, of all methods, with the same seeds.
    """
    experiment, margins = EXPERIMENTS[name], EXPERIMENTS[name].margins
    ends = {(row["method"], row["values"], row["seed"]): mean(row["errors"][-3:]) for row in rows}
    sent = {
        (row["method"], row["values"], row["seed"], margin): find_bytes(
            row, ends["FedAvg", experiment.formats[0], row["seed"]] + margin
        )
        for row in rows
        for margin in margins
    }
    lines = [f"| {name} | seeds | error at the end | " + " | ".join(f"MB to +{margin:g}" for margin in margins) + " |"]
    lines.append("| --- " * (len(margins) + 3) + "|")
    keys = [(method, values) for method in experiment.methods for values in experiment.formats]
    for key in keys:
        seeds = [seed for *name_, seed in ends if tuple(name_) == key]
        if not seeds:
            continue
        errors, cells = [ends[(*key, seed)] for seed in seeds], []
        for margin in margins:
            number = average([sent[(*key, seed, margin)] for seed in seeds])
            old = [
                average([sent.get((*other, seed, margin)) for seed in seeds])
                for other in keys
                if other[1] in OLD_FORMATS
            ]
            least = min((figure for figure in old if figure is not None), default=None)
            cells.append(
                "not reached"
                if number is None
                else f"{number / 1e6:.2f}" + (f" ({least / number:.1f}x)" if least else "")
            )
        spread = f"{mean(errors):.2f} ({min(errors):.2f}-{max(errors):.2f})"
        lines.append(f"| {key[0]}, {key[1]} | {len(seeds)} | {spread} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder with brain_t1/ and brain_morphometry/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=EXPERIMENTS, nargs="+", default=list(EXPERIMENTS))
    parser.add_argument("--minutes", type=float, default=None, help="start no further run after this time")
    parser.add_argument("--out", type=Path, default=Path("runs/bytes_to_error"))
    parser.add_argument("--report", action="store_true", help="print the tables of the files in --out")
    parser.add_argument("--docs", action="store_true", help="write them to docs/results/bytes.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began, tables = time.monotonic(), []
    for name in arguments.only:
        folder = arguments.out / name
        folder.mkdir(parents=True, exist_ok=True)
        # The formats of every method that matter most come first, so that an interrupted experiment compares them.
        experiment = EXPERIMENTS[name]
        order = product(experiment.formats, arguments.seeds, experiment.methods)
        for values, seed, method in order if arguments.data else ():
            file = folder / f"{method} {values} {seed}.json".replace(" ", "_")
            if arguments.minutes is not None and time.monotonic() - began > 60 * arguments.minutes:
                return 0
            with claim(file) as is_claimed:
                if not is_claimed:
                    continue
                row = run(experiment, method, values, seed, arguments.data)
                part = file.with_suffix(".new")
                part.write_text(json.dumps(row) + "\n")
                part.replace(file)
            print(f"{name} {method} {values} {seed}: {row['errors'][-1]:.2f}, {row['seconds']:.0f} s", flush=True)
        if arguments.report or arguments.docs:
            tables.append(report(name, [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]))
    if arguments.report:
        print(*tables, sep="\n\n")
    if arguments.docs:
        write_section("bytes", "bytes", "\n\n".join(tables) + "\n", dict(enumerate(arguments.only, start=1)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
