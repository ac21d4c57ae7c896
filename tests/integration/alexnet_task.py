"""AlexNet3D at the paper's input size on a few random volumes, to measure its messages."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse import Examples, Metric, SiteData, Task
from flare_sparse.tasks.models import build_model


class VolumeTask(Task):
    metric = Metric("loss", "", "min")

    def model(self) -> nn.Module:
        return build_model("alexnet3d", volume=(121, 145, 121), outputs=1)

    def load(self, data: SiteData, seed: int) -> Examples:
        generator = torch.Generator().manual_seed(int(data.site[-1]))
        train = TensorDataset(torch.rand(2, 1, 121, 145, 121, generator=generator), torch.tensor([[0.0], [1.0]]))
        return Examples(train, TensorDataset(torch.zeros(0, 1), torch.zeros(0, 1)))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    def predict(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"loss": float(nn.functional.binary_cross_entropy_with_logits(predictions, targets))}
