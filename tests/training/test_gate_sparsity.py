"""Channel sparsity in a site's evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse.core.params import Layout
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task
from flare_sparse.training import LocalTask, build_site


class Opener(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).float()


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = Opener(), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.gate(x))


class Gating(Task):
    metric = Metric("mse", "", "min")

    def model(self) -> nn.Module:
        return nn.Sequential(Gates())

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mse": float(predictions.square().mean())}


def test_evaluation_reports_the_share_of_closed_gates() -> None:
    task = Gating()
    layout = Layout.from_module(task.model())
    x = torch.tensor([[1.0, -1.0], [2.0, 3.0], [-1.0, -1.0]])
    data = TensorDataset(x, x[:, :1])
    local = LocalTask.open("site-1", task, Examples(data, data), layout, 1)
    figures = build_site(local).evaluate(torch.zeros(layout.size))
    assert figures["channel_sparsity"] == pytest.approx(3 / 6)
    assert figures["test_examples"] == 3
    assert not local.model.module[0].gate._forward_hooks
