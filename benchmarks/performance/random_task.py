"""The task of ``masked_training.py`` and ``private_training.py``, whose data are random."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flare_sparse.tasks.models import build_model
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task


class RandomTask(Task):
    """Regression of random numbers on random inputs.

    Args:
        name: name of the network.
        settings: its settings.
    """

    metric = Metric("error", "", "min")

    def __init__(self, name: str, **settings: Any):
        super().__init__()
        self.name, self.settings = name, settings

    def model(self) -> nn.Module:
        return build_model(self.name, **self.settings)

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def predict(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        return {"error": float((predictions - targets).abs().mean())}
