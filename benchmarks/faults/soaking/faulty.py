"""A task whose training fails at random: it raises, returns NaN, gets a wrong shape, or takes too long."""

from __future__ import annotations

import random
import time
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flare_sparse import Examples, Metric, SiteData, Task, TaskConfig

FAULTS = ("raise", "nan", "shape", "late")


class FaultyConfig(TaskConfig):
    share: float = 0.0
    late_s: float = 0.0
    width: int = 32
    faults: Literal["random", "none"] = "random"


class FaultyTask(Task):
    """The sum of three of twelve numbers; every site draws its own data, and a round trains on one batch."""

    Config = FaultyConfig
    config: FaultyConfig
    metric = Metric("mse", "", "min")

    def model(self) -> nn.Module:
        width = self.config.width
        return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 1))

    def load(self, data: SiteData, seed: int) -> Examples:
        self._random = random.Random(f"{seed} {data.site}")
        draw = torch.Generator().manual_seed(seed + sum(map(ord, data.site)))
        x = torch.randn(40, 12, generator=draw)
        y = x[:, :3].sum(1, keepdim=True)
        return Examples(TensorDataset(x[8:], y[8:]), TensorDataset(x[:8], y[:8]))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the loss of one batch; a fault occurs with probability ``share``."""
        fault = self._random.choice(FAULTS) if self._random.random() < self.config.share else "none"
        if fault == "raise":
            raise RuntimeError("a random fault")
        if fault == "late":
            time.sleep(self.config.late_s)
        inputs = batch[0][:, :7] if fault == "shape" else batch[0]
        error = nn.functional.mse_loss(model(inputs), batch[1])
        return error * float("nan") if fault == "nan" else error

    def predict(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        return {"mse": float((predictions - targets).square().mean())}
