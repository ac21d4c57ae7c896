"""A task of one linear layer for tests of the command line, which they call through :func:`call`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner, Result

from flare_sparse.cli import app
from flare_sparse.core.errors import DataError
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task, TaskConfig


class LineConfig(TaskConfig):
    width: int = Field(2, ge=1, description="numbers in an example")
    broken: bool = Field(False, description="the model cannot be built")
    crash: bool = Field(False, description="the loss raises an error of its own")
    scale: float = Field(1.0, description="scale of the numbers in an example")


class LineTask(Task):
    """Predict the sum of a few numbers; the folder of each site must hold a file ``ok``."""

    Config = LineConfig
    metric = Metric("mae", "", "min")

    def model(self) -> nn.Module:
        assert isinstance(self.config, LineConfig)
        return nn.Linear(self.config.width, 1).to(torch.float64 if self.config.broken else torch.float32)

    def load(self, data: SiteData, seed: int) -> Examples:
        assert isinstance(self.config, LineConfig)
        if not (data.path / "ok").is_file():
            raise DataError(f"{data.path.name}: no file 'ok'; put one there")
        x = self.config.scale * torch.rand(10, self.config.width, generator=torch.Generator().manual_seed(seed))
        return Examples(TensorDataset(x[:8], x[:8].sum(1)), TensorDataset(x[8:], x[8:].sum(1)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(self.config, LineConfig)
        if self.config.crash:
            return batch[0].sum() * (1 // 0)
        return nn.functional.l1_loss(model(batch[0]).squeeze(1), batch[1])

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]).squeeze(1), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mae": float((predictions - targets).abs().mean())}


def call(*arguments: str | Path, columns: int = 200) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": str(columns), "TERM": "dumb"})
