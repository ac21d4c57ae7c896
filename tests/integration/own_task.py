"""A user task as docs/own-task.md describes it: one class in one module. Sites can be made to fail."""

from __future__ import annotations

import os
import signal
from typing import Literal

import torch
from pydantic import Field
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse import Examples, Metric, SiteData, Task, TaskConfig
from flare_sparse.core.errors import DataError

Failure = Literal["data", "load", "die", "diverge", "train"]


class SumConfig(TaskConfig):
    width: int = 16
    failures: dict[str, Failure] = Field(default_factory=dict)


class SumTask(Task):
    """Predict the sum of three of twelve random numbers, which differ between sites."""

    Config = SumConfig
    failure: Failure | None = None
    metric = Metric("mse", "", "min")

    def model(self) -> nn.Module:
        width = self.config.width
        return nn.Sequential(
            nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1)
        )

    def load(self, data: SiteData, seed: int) -> Examples:
        self.failure = self.config.failures.get(data.site)
        if self.failure in ("data", "load"):
            error_type = DataError if self.failure == "data" else KeyError
            raise error_type(f"subject {self._subject} in {data.path} cannot be read")
        if self.failure == "die" and not (died := data.path / "died").exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(int(data.site[-1]))
        x = torch.randn(40, 12, generator=generator)
        y = x[:, :3].sum(1, keepdim=True)
        start = 12 if self.config.split.validation else 8
        train, test, validation = (
            TensorDataset(x[part], y[part]) for part in (slice(start, 40), slice(8), slice(8, start))
        )
        return Examples(train, test, validation=validation)

    @property
    def _subject(self) -> str:
        return "-".join(("CANARY", "4711"))  # the text is complete only in an error, not in this source

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if self.failure == "train":
            raise KeyError(f"subject {self._subject}")
        if self.failure == "diverge":
            return nn.functional.mse_loss(model(batch[0]), batch[1] * float("inf"))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def predict(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mse": float((predictions - targets).square().mean())}
