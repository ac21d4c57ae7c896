"""Accuracy and bytes of LoRA-A2 on BANKING77, against FL+LoRA, FFA-LoRA and FlexLoRA.

Ten sites, ranks 8, 4, 2 and 1, three Dirichlet partitions. The encoder is the pre-trained all-MiniLM-L6-v2 with 36
adapted modules; its weights are frozen, and so is the random head, as in the paper. Every message goes through the wire
and is counted. The experiment is small: part of the rows, short texts, few rounds (the paper: all rows, E = 5, T = 50,
30 sites, RoBERTa-base).

    export FLARE_SPARSE_MODELS=/models        # holds all-MiniLM-L6-v2/
    python benchmarks/experiments/banking77.py --data /data/banking77.csv.gz --out runs/banking77 [--only lora_a2]

Each run writes one file. Finished runs are not repeated, and several processes may share the work. The table of all
finished runs is printed at the end, or alone with ``--table``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flare_sparse.assemble import build_initial_model
from flare_sparse.data.partition import partition_dirichlet
from flare_sparse.local.run import run_locally
from flare_sparse.methods import METHODS
from flare_sparse.task import SiteData
from flare_sparse.tasks import TASKS
from flare_sparse.training import Site

METHOD_LABELS = {"lora_a2": "LoRA-A2", "fedavg": "FL+LoRA", "ffa_lora": "FFA-LoRA", "flexlora": "FlexLoRA"}
ALPHAS = (0.01, 0.5, 0.1)
RANKS = ((8, 1), (4, 2))
"""The extreme ranks come first, so that an interrupted experiment shows the range."""


def list_jobs(only: str | None) -> Iterator[tuple[float, int, str]]:
    for ranks in RANKS:
        for alpha in ALPHAS:
            for rank in ranks:
                yield from ((alpha, rank, name) for name in METHOD_LABELS if only in (None, name))


def run(alpha: float, rank: int, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run. LoRA-A2 chooses among 16 slots of a module; the others have ``rank`` slots."""
    task = TASKS["text_classification"](
        {
            "base": options.base,
            "adapter": {"rank": 16 if name == "lora_a2" else rank},
            "every": options.every,
            "max_length": options.max_length,
        }
    )
    training = {"epochs": options.epochs, "batch_size": 8, "optimizer": "adamw", "lr": options.lr, "weight_decay": 0.01}
    settings: dict[str, Any] = {"rounds": options.rounds, "training": training}
    if name in ("lora_a2", "flexlora"):
        settings["rank"] = rank
    layout, weights = build_initial_model(task, seed)
    method = METHODS[name](METHODS[name].Config.model_validate(settings), layout, seed)
    parts = partition_dirichlet(task.cohort(options.data), options.sites, alpha=alpha, seed=seed)
    sites = {
        site: Site(site, task, task.load(SiteData(site, options.data, ids), seed), layout, seed)
        for site, ids in parts.items()
    }
    began = time.monotonic()
    outcome, ledger = run_locally(method, weights, sites, task.metric, thread_count=1)
    up = [line for line in ledger.lines if line.direction == "up"]
    curve = [record.evaluation.overall["accuracy"] for record in outcome.rounds]
    return {
        "seed": seed,
        "alpha": alpha,
        "rank": rank,
        "method": name,
        "accuracy": curve[-1],
        "curve": curve,
        "scalars_up": sum(line.scalars_sent for line in up),
        "bytes_up": sum(line.payload_bytes for line in up),
        "bytes_down": sum(line.payload_bytes for line in ledger.lines if line.direction == "down"),
        "encodings": sorted({line.encoding for line in up if line.kind == "train"}),
        "seconds": time.monotonic() - began,
        "examples": sum(site.num_examples for site in sites.values()),
        "test_examples": outcome.evaluation.overall["test_examples"],
        "settings": {k: str(v) for k, v in vars(options).items() if k not in ("data", "out", "only", "table", "seeds")},
    }


def print_table(out: Path) -> None:
    """Print Markdown: final accuracy, mean (lowest to highest seed), and uploads, mean over the columns."""
    results = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    print(
        "| rank | method | "
        + " | ".join(f"Dir {a}" for a in sorted(ALPHAS, reverse=True))
        + " | M scalars up | MB up |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rank in sorted((rank for pair in RANKS for rank in pair), reverse=True):
        for name, label in METHOD_LABELS.items():
            rows = [row for row in results if (row["rank"], row["method"]) == (rank, name)]
            if not rows:
                continue
            cells = [
                format_spread([row["accuracy"] for row in rows if row["alpha"] == a]) for a in sorted(ALPHAS)[::-1]
            ]
            scalars = sum(row["scalars_up"] for row in rows) / len(rows) / 1e6
            megabytes = sum(row["bytes_up"] for row in rows) / len(rows) / 1e6
            print(f"| {rank} | {label} | " + " | ".join(cells) + f" | {scalars:.2f} | {megabytes:.2f} |")


def format_spread(shares: list[float]) -> str:
    """Return ``mean (lowest to highest)`` in per cent; a dash if there is no value."""
    if not shares:
        return "-"
    mean = f"{100 * sum(shares) / len(shares):.1f}"
    return mean if len(shares) == 1 else f"{mean} ({100 * min(shares):.1f} to {100 * max(shares):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", default="all-MiniLM-L6-v2")
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--max-length", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", choices=list(METHOD_LABELS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    jobs = [] if options.table else [(seed, *job) for seed in options.seeds for job in list_jobs(options.only)]
    for seed, alpha, rank, name in jobs:
        file = options.out / f"{name}-{rank}-{alpha}-{seed}.json"
        try:
            file.with_suffix(".claimed").open("x").close()
        except FileExistsError:
            continue
        row = run(alpha, rank, name, seed, options)
        file.write_text(json.dumps(row, indent=2) + "\n")
        print(
            f"{name} rank {rank} alpha {alpha} seed {seed}: {row['accuracy']:.3f} in {row['seconds']:.0f} s", flush=True
        )
    print_table(options.out)


if __name__ == "__main__":
    main()
