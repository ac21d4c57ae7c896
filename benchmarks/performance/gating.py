"""Time of inference of networks with closed channels, against networks without gates.

    python benchmarks/performance/gating.py [--closed 0.25 0.4 0.5] [--repeats 60] [--write docs/results/gating.csv]

One thread, seconds of processor time. Every repeat times all variants one after another; a ratio is the median over
repeats of the ratio to the ungated network in the same repeat. In each gated layer a share ``--closed`` of the channels
is closed for every example, as by the Group Lasso.

The compact network is the copy without the channels that no input opens (``structure/compact.py``).
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from flare_sparse.compute.structure.compact import compact_model
from flare_sparse.tasks.models import build_model
from flare_sparse.tasks.models.gates import ChannelGate, GateConfig, add_gates

COLUMNS = (
    "closed", "network", "what", "ungated_ms", "compact_ms", "compact_ratio",
)  # fmt: skip
"""Columns of the file."""


@dataclass(frozen=True)
class Case:
    network: str
    settings: dict[str, Any]
    layers: tuple[str, ...]
    shape: tuple[int, ...]

    def build_network(self, *, gates: bool, detach: bool = True) -> nn.Module:
        torch.manual_seed(0)
        network = build_model(self.network, **self.settings)
        return add_gates(network, GateConfig(layers=self.layers, detach_input=detach)) if gates else network


CASES = {
    "CIFAR, 3 conv., third gated": Case(
        "image_cnn", {"image": (3, 32, 32), "channels": (32, 64, 128)}, ("2",), (3, 32, 32)
    ),
    "CIFAR, 6 conv., 5th and 6th gated": Case("image_cnn6", {"image": (3, 32, 32)}, ("4", "5"), (3, 32, 32)),
    "Brain age, 6 mm, blocks 2-5 gated": Case("brain_age_cnn_3mm", {}, ("1", "2", "3", "4"), (1, 26, 32, 26)),
}


@torch.no_grad()
def close_channels(network: nn.Module, share: float) -> None:
    """Close a share of the channels of every gated layer for every input; all others stay open."""
    for part in network.modules():
        if isinstance(part, ChannelGate):
            part.open.weight.zero_()
            channels = part.open.out_features
            part.open.bias.fill_(1)
            part.open.bias[
                torch.randperm(channels, generator=torch.Generator().manual_seed(1))[: int(share * channels)]
            ] = -1


def time_variants(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float]]:
    """Return each variant's median milliseconds and median ratio to the first variant."""
    for work in variants.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, work in variants.items():
            began = time.thread_time()
            work()
            seconds[name].append(time.thread_time() - began)
    first = next(iter(seconds.values()))
    return {
        name: (1e3 * median(own), median(a / b for a, b in zip(own, first, strict=True)))
        for name, own in seconds.items()
    }


def time_inference(case: Case, share: float, batch: int, repeats: int) -> dict[str, tuple[float, float]]:
    plain, wrapped = case.build_network(gates=False).eval(), case.build_network(gates=True).eval()
    close_channels(wrapped, share)
    x = torch.randn(batch, *case.shape)
    with torch.no_grad():
        small = compact_model(wrapped)
        assert torch.allclose(small(x), wrapped(x), atol=1e-4), "the compact copy computes something else"
        return time_variants({"ungated": lambda: plain(x), "compact": lambda: small(x)}, repeats)


def list_cells(times: dict[str, tuple[float, float]]) -> list[str]:
    """Return milliseconds of the first variant, and milliseconds and ratio of the others."""
    first, *others = times.values()
    return [f"{first[0]:.2f}", *(cell for ms, ratio in others for cell in (f"{ms:.2f}", f"{ratio:.2f}"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--closed", type=float, nargs="+", default=[0.25, 0.4, 0.5], help="shares of closed channels in gated layers"
    )
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--write", type=Path, default=None, help="also write the table to this CSV file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [list(COLUMNS)]
    for share in arguments.closed:
        for cells in time_cases(share, arguments.repeats):
            rows.append([f"{share:.2f}", *cells])
            print(",".join(cells), flush=True)
    if arguments.write:
        with arguments.write.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    return 0


def time_cases(share: float, repeats: int) -> Iterator[list[str]]:
    """Yield the cells of the rows of one share of closed channels, without the share."""
    for label, case in CASES.items():
        is_image = len(case.shape) == 3
        for batch in (1, 32):
            count = repeats if batch > 1 else 5 * repeats
            times = time_inference(case, share, batch, count if is_image else count // 4)
            yield [label, f"inference, batch {batch}", *list_cells(times)]


if __name__ == "__main__":
    sys.exit(main())
