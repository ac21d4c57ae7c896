"""A task that sends networks and trains next to nothing, so that a round's time and memory are the package's.

Benchmarks send this module to the sites.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse.tasks.models.registry import build_model
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task, TaskConfig

SITES = [f"site-{i}" for i in range(1, 5)]


class IdleNet(nn.Module):
    """Tensors that are sent but not trained, and one scalar, on which alone the loss depends.

    Args:
        network: name of the package's network that has the tensors; empty: one linear layer.
        millions: weights of that layer, in millions.
    """

    def __init__(self, network: str = "", millions: int = 30):
        super().__init__()
        # FLARE's export reads a component's arguments back from its attributes.
        self.network, self.millions = network, millions
        self.body = build_model(network) if network else nn.Linear(1000, 1000 * millions, bias=False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class IdleConfig(TaskConfig):
    network: str = ""
    millions: int = 30


class IdleTask(Task):
    """One training and one test example, and next to no arithmetic; a site writes its memory into its data folder."""

    Config = IdleConfig
    metric = Metric("error", "", "min")
    _start: int | None = None
    _file: Path | None = None

    def model(self) -> nn.Module:
        if self._start is None:
            self._start = read_memory("VmRSS")
        return IdleNet(self.config.network, self.config.millions)

    def load(self, data: SiteData, seed: int) -> Examples:
        self._file = data.path / f"{data.site}.memory"
        one = TensorDataset(torch.ones(1, 1), torch.zeros(1, 1))
        return Examples(one, one)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).square().mean()

    def predict(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        if self._file is not None and self._start is not None:
            self._file.write_text(str(read_memory("VmHWM") - self._start))
        return {"error": float((predictions - targets).abs().mean())}


def read_memory(field: str) -> int:
    """Return bytes of this process: ``VmRSS`` that it has, ``VmHWM`` that it had at most."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
