"""Time of a training step with a mask, computed densely, against plain dense training in torch.

    python benchmarks/performance/masked_training.py [--repeats 7] [--steps 2] [--networks NAME ...] [--write FILE]

One thread, seconds of processor time. Every repeat times, one after another, a plain loop of torch (``zero_grad``,
``backward``, ``step`` over the network's own parameters) and the training of a site with ``compute: dense``, with a
full mask and at 90 % and 99 % sparsity. A ratio is the median over repeats of the ratio to torch in the same repeat.
All train the same network with the same optimiser on the same number of minibatches. Exits with 1 if a mask costs
more than 3 %.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_task import RandomTask
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.mask import Mask
from flare_sparse.tasks.task import Examples, Task
from flare_sparse.training import LocalTask, TrainingConfig, build_site

BOUND = 1.03
NETWORKS: dict[str, tuple[tuple[int, ...], int]] = {
    "brain_age_cnn_3mm": ((26, 32, 26), 8),
    "alexnet3d": ((121, 145, 121), 1),
}
"""Size of the volumes and examples of a minibatch, by network."""
OPTIMIZERS = ("sgd", "adam")


def train_plainly(task: Task, network: nn.Module, data: TensorDataset, batch_size: int, optimizer: str) -> None:
    """Train one pass, as a tutorial of torch does."""
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    stepper: torch.optim.Optimizer = kind(network.parameters(), lr=1e-4)
    network.train()
    for batch in DataLoader(data, batch_size=batch_size, shuffle=True):
        stepper.zero_grad()
        loss = task.loss(network, batch)
        # As every loop does that reports its loss or stops at NaN.
        loss.item()
        loss.backward()
        stepper.step()


def build_variants(name: str, optimizer: str, steps: int) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name; torch's plain loop first."""
    shape, batch_size = NETWORKS[name]
    task, draw = RandomTask(name), torch.Generator().manual_seed(1)
    volumes = torch.randn(steps * batch_size, 1, *shape, generator=draw)
    data = TensorDataset(volumes, torch.zeros(len(volumes), 1))
    layout, start = build_initial_model(task, 1)
    site = build_site(LocalTask.open("site-1", task, Examples(data, data), layout, 1))
    config: Any = TrainingConfig(epochs=1, batch_size=batch_size, optimizer=optimizer, lr=1e-4, compute="dense")
    noise, network = torch.rand(layout.size, generator=draw), task.model()
    maskable = Mask.from_preset(layout, "conv_linear_weights").bits

    def build_site_variant(sparsity: float) -> Callable[[], Any]:
        mask = Mask(~maskable | (noise >= sparsity))
        vector = start.where(mask.bits, 0.0)
        return lambda: site.train_entries(vector, mask, config, 1)

    plain = {"torch": lambda: train_plainly(task, network, data, batch_size, optimizer)}
    return plain | {f"{sparsity:.0%} off": build_site_variant(sparsity) for sparsity in (0.0, 0.9, 0.99)}


def measure(name: str, optimizer: str, repeats: int, steps: int) -> dict[str, Any]:
    variants = build_variants(name, optimizer, steps)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for repeat in range(repeats + 1):
        for variant, train in variants.items():
            began = time.process_time()
            train()
            # The first repeat pays for memory and for the choice of algorithms.
            if repeat:
                seconds[variant].append((time.process_time() - began) / steps)
    plain = seconds.pop("torch")
    ratios = {variant: median(a / b for a, b in zip(part, plain, strict=True)) for variant, part in seconds.items()}
    return {"network": name, "optimizer": optimizer, "torch_s": median(plain), "ratios": ratios}


def format_page(rows: list[dict[str, Any]], command: str) -> str:
    lines = [
        "# Training with a mask, computed densely",
        "",
        f"`{command}`: processor time of a training step relative to a plain loop of torch,",
        f"one thread, {platform.machine()}, torch {torch.__version__}. The optimiser steps the live entries only.",
        "",
        "| network | optimiser | torch | all live | 90 % off | 99 % off |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratios = " | ".join(f"{ratio:.3f}" for ratio in row["ratios"].values())
        lines.append(f"| {row['network']} | {row['optimizer']} | {row['torch_s']:.2f} s | {ratios} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="page of results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.networks:
        for optimizer in OPTIMIZERS:
            rows.append(measure(name, optimizer, arguments.repeats, arguments.steps))
            print(rows[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.write:
        command = "python " + " ".join(sys.argv)
        arguments.write.write_text(format_page(rows, command))
    return int(max(ratio for row in rows for part, ratio in row["ratios"].items() if part != "0% off") > BOUND)


if __name__ == "__main__":
    sys.exit(main())
