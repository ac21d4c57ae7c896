"""Error and bytes of adapting a brain network to another hospital: LoRA-A2 against other LoRA methods and FedAvg.

The base model learns age (or sex) from IXI-HH by FedAvg at four sites; then three sites that share NSK adapt it. The
two data sets differ in scanners, brain extraction and ages, so the base model alone has a large error at NSK (first
row).

    python benchmarks/experiments/brain_adaptation.py ../shared/data/brain_t1 [--task sex_classification] [--seeds 2]

The table shows means over seeds, which draw the splits, the sites and the adapters. A seed has 13 to 15 test subjects
of NSK: a difference of one year is noise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.methods.registry import METHODS
from flare_sparse.rounds.local.run import Transport, run_locally
from flare_sparse.tasks.data.partition import IidPartition
from flare_sparse.tasks.models.base import MODELS_VARIABLE
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import SiteData, Task
from flare_sparse.training import LocalTask, build_site
from flare_sparse.training.personal import select_personal
from flare_sparse.wire.formats import ValueType

RANK = 2
ADAPTER = {"alpha": 16, "head": "trained"}
LOCAL = {"epochs": 3, "batch_size": 8, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01}
ROWS: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "full fine-tuning (FedAvg)": ("fedavg", None, {}),
    "FL+LoRA": ("fedavg", {"rank": RANK}, {}),
    "dual LoRA: half of the rank stays at the site": (
        "fedavg",
        {"rank": RANK // 2, "site_rank": RANK // 2},
        {"personal": "site"},
    ),
    "top-k 25 % of the adapters both ways, int4": ("topk_ef", {"rank": RANK}, {"fraction": 0.25, "down": 0.25}),
    "FFA-LoRA": ("ffa_lora", {"rank": RANK}, {}),
    "FlexLoRA": ("flexlora", {"rank": RANK}, {"rank": RANK}),
    "HetLoRA": ("hetlora", {"rank": RANK}, {"rank": RANK}),
    "LoRA-A2, slots": ("lora_a2", {"rank": 16}, {"rank": RANK}),
    "LoRA-A2, scalars": ("lora_a2", {"rank": 16}, {"rank": RANK, "budget": "scalars"}),
    "LoRA-A2, magnitude": ("lora_a2", {"rank": 16}, {"rank": RANK, "score": "magnitude"}),
    "LoRA-A2, sensitivity": ("lora_a2", {"rank": 16}, {"rank": RANK, "score": "sensitivity"}),
}


def run(task: Task, name: str, settings: dict[str, Any], folder: Path, sites: int, seed: int) -> tuple[Any, Any, Any]:
    """Return outcome, ledger and layout of a run over a BIDS folder that is partitioned at random."""
    network, initial = build_initial_model(task, seed)
    config = METHODS[name].Config.model_validate(settings)
    tensors = network.unflatten(initial)
    personal = {tensor: tensors.pop(tensor).clone() for tensor in select_personal(network, config.personal)}
    layout = network.drop(personal)
    weights = layout.flatten(tensors)
    method = METHODS[name](config, layout, seed)
    parts = IidPartition(seed=seed).divide(task.cohort(folder), sites)
    site_by_name = {
        site: build_site(
            LocalTask.open(site, task, task.load(SiteData(site, folder, ids), seed), layout, seed), personal=personal
        )
        for site, ids in parts.items()
    }
    # Top-k keeps what it rounds off; the other methods send what their papers send.
    values: ValueType = "int4" if name == "topk_ef" else "float32"
    return *run_locally(method, weights, site_by_name, task.metric, transport=Transport(values=values)), layout


def train_base(name: str, data: Path, models: Path, rounds: int, seed: int) -> float:
    """Train the base model into ``models/base``; return its metric at IXI-HH."""
    task = TASKS[name]()
    training = {"epochs": 2, "batch_size": 8, "optimizer": "adam", "lr": 1e-3}
    outcome, _, layout = run(task, "fedavg", {"rounds": rounds, "training": training}, data / "IXI-HH", 4, seed)
    model = task.model()
    model.load_state_dict(layout.unflatten(outcome.weights), strict=False)
    task.save(model, models / "base")
    return float(outcome.evaluation.overall[task.metric.name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--task", choices=["brain_age", "sex_classification"], default="brain_age")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--base-rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    name, metric = options.task, TASKS[options.task].metric.name
    figures: dict[str, list[tuple[float, float, float, float, float]]] = {row: [] for row in ROWS}
    base_at_nsk, base_at_ixi = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[MODELS_VARIABLE] = folder
        for seed in range(1, options.seeds + 1):
            base_at_ixi.append(train_base(name, options.data, Path(folder), options.base_rounds, seed))
            starts = []
            for row, (method, adapter, settings) in ROWS.items():
                task = TASKS[name]({"base": "base", "adapter": adapter and {**ADAPTER, **adapter}})
                began = time.monotonic()
                config = {"rounds": options.rounds, "training": LOCAL, **settings}
                outcome, ledger, _ = run(task, method, config, options.data / "NSK", 3, seed)
                up = [line for line in ledger.lines if line.direction == "up"]
                # The first request in int4 rounds the base model's adapters.
                if method != "topk_ef":
                    starts.append(outcome.rounds[0].evaluation.overall[metric])
                figures[row].append(
                    (
                        outcome.evaluation.overall[metric],
                        sum(line.scalars_sent for line in up),
                        sum(line.payload_bytes for line in up),
                        sum(line.payload_bytes for line in ledger.lines if line.direction == "down"),
                        time.monotonic() - began,
                    )
                )
            assert max(starts) - min(starts) < 1e-3, "every method starts from the base model"
            base_at_nsk.append(starts[0])
            print(f"seed {seed}: base {base_at_ixi[-1]:.3f} at IXI-HH, {base_at_nsk[-1]:.3f} at NSK", flush=True)
    print(f"\n| | {metric} | k scalars up | kB up | kB down | seconds |\n| --- | --- | --- | --- | --- | --- |")
    print(f"| base model, not adapted | {format_mean(base_at_nsk)} | 0 | 0 | 0 | |")
    for row, runs in figures.items():
        error, scalars, up_bytes, down_bytes, seconds = (list(column) for column in zip(*runs, strict=True))
        sizes = " | ".join(f"{statistics.mean(values) / 1000:.1f}" for values in (scalars, up_bytes, down_bytes))
        print(f"| {row} | {format_mean(error)} | {sizes} | {statistics.mean(seconds):.0f} |")


def format_mean(values: list[float]) -> str:
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


if __name__ == "__main__":
    main()
