"""A CIFAR ResNet that is sent but never trained, and its task; ``coinstac.py`` sends this module to the sites."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse.tasks.models.registry import build_model
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task, TaskConfig


class IdleResNet(nn.Module):
    """All tensors of a ResNet, and one scalar, on which alone the loss depends: training costs nothing."""

    def __init__(self, name: str = "resnet32"):
        super().__init__()
        # FLARE's export reads a component's arguments back from its attributes.
        self.name = name
        self.body = build_model(name)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class IdleConfig(TaskConfig):
    network: str = "resnet32"


class IdleTask(Task):
    """One training example, one test example."""

    Config = IdleConfig
    metric = Metric("error", "", "min")

    def model(self) -> nn.Module:
        return IdleResNet(self.config.network)

    def load(self, data: SiteData, seed: int) -> Examples:
        one = TensorDataset(torch.ones(1, 1), torch.zeros(1, 1))
        return Examples(one, one)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).square().mean()

    def predict(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"error": float((predictions - targets).abs().mean())}
