r"""Cost of a training step with differential privacy against plain training, dense and sparse.

    python benchmarks/performance/private_training.py [--repeats 5] [--steps 4] [--networks NAME ...]

One thread, processor time. Every repeat times all variants one after another: a site's training of the same network,
optimiser, minibatch size and number of steps, plain and private, with a full mask and at 90 % and 98 % sparsity. Both
ratios are medians over the repeats of ratios within one repeat. Memory is the peak of a process above what it held
before, in one training (Linux only). Clipping norm and noise do not change the cost.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_task import RandomTask
from torch import Tensor
from torch.utils.data import TensorDataset

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.mask import Mask
from flare_sparse.privacy.dp.account import PrivacyAccount
from flare_sparse.privacy.dp.accounting import SamplingPlan
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.mechanism import SiteMechanism
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, Site, SitePrivacy, TrainingConfig, build_site

NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "mlp": ({"features": 193}, (193,), 64),
    "brain_age_cnn_3mm": ({}, (1, 26, 32, 26), 8),
}
"""Settings, shape of an input and examples of a minibatch, by network."""
SPARSITIES = (0.0, 0.9, 0.98)


def build_variants(name: str, steps: int) -> dict[str, Callable[[], Any]]:
    """Return the trainings by name, plain and private of each sparsity."""
    _, shape, batch_size = NETWORKS[name]
    task, draw = RandomTask(name, **NETWORKS[name][0]), torch.Generator().manual_seed(1)
    count = steps * batch_size
    data = TensorDataset(torch.randn(count, *shape, generator=draw), torch.randn(count, 1, generator=draw))
    layout, start = build_initial_model(task, 1)
    config: Any = TrainingConfig(epochs=1, batch_size=batch_size, optimizer="adam", lr=1e-3)
    scores = torch.rand(layout.size, generator=draw)
    maskable = Mask.from_preset(layout, "conv_linear_weights").bits
    variants: dict[str, Callable[[], Any]] = {}
    for sparsity in SPARSITIES:
        mask = Mask(~maskable | (scores >= sparsity))
        vector = start.where(mask.bits, 0.0)
        for kind in ("plain", "private"):
            mechanism = None
            if kind == "private":
                privacy = PrivacyConfig(epsilon=None, noise_multiplier=1.0)
                plan = SamplingPlan.build(count, batch_size, 1, 1)
                mechanism = SiteMechanism(privacy, plan, PrivacyAccount(), "0" * 16, "job")
            local = LocalTask.open("site-1", task, Examples(data, data), layout, 1)
            site = build_site(local, privacy=SitePrivacy(mechanism))
            variants[f"{kind} {sparsity:.0%}"] = build_training(site, vector, mask, config)
    return variants


def build_training(site: Site, vector: Tensor, mask: Mask, config: Any) -> Callable[[], Any]:
    return lambda: site.train_entries(vector, mask, config, 1)


def measure_peak(train: Callable[[], Any]) -> float:
    """Return the MB by which the memory of a process peaks above its size before the training."""
    receiver, sender = os.pipe()
    # In a copy of this process: an allocator keeps what earlier trainings took, which would hide the peak.
    child = os.fork()
    if child == 0:
        # 5: reset the peak to the present size (man 5 proc).
        Path("/proc/self/clear_refs").write_text("5")
        before = read_memory("VmRSS")
        train()
        os.write(sender, str(read_memory("VmHWM") - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(receiver, 32)) / 1024


def read_memory(key: str) -> int:
    """Return a figure of the process in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key)))


def measure(name: str, repeats: int, steps: int) -> list[str]:
    """Return the lines of a network in the table."""
    variants = build_variants(name, steps)
    peaks = {variant: measure_peak(train) for variant, train in variants.items()}
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(repeats):
        for variant, train in variants.items():
            began = time.process_time()
            train()
            seconds[variant].append((time.process_time() - began) / steps)
    lines = []
    for sparsity in SPARSITIES:
        plain, private = (seconds[f"{kind} {sparsity:.0%}"] for kind in ("plain", "private"))
        by_dense = median(a / b for a, b in zip(private, seconds["private 0%"], strict=True))
        ratio = median(a / b for a, b in zip(private, plain, strict=True))
        milliseconds = f"{1000 * median(plain):.1f} ms | {1000 * median(private):.1f} ms"
        lines.append(
            f"| {name} | {sparsity:.0%} | {milliseconds} | {ratio:.1f} | "
            f"{by_dense:.2f} | {peaks[f'plain {sparsity:.0%}']:.0f} MB | {peaks[f'private {sparsity:.0%}']:.0f} MB |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | off | plain step | private step | ratio | to private dense | peak, plain | peak, private |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.networks:
        for line in measure(name, arguments.repeats, arguments.steps):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
