"""A small network with adapters; two sites cannot take part: one has another version, one too small an upload cap."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse import Examples, Metric, SiteData, Task
from flare_sparse.config.policy.policy import Policy
from flare_sparse.core.seeds import seed_torch
from flare_sparse.flare import session
from flare_sparse.tasks.models.adapters import AdapterConfig, add_adapters
from flare_sparse.wire import capabilities


class CapableTask(Task):
    """Each site runs in its own process, so that ``load`` changes that site only."""

    metric = Metric("mse", "", "min")

    def model(self) -> nn.Module:
        with seed_torch(0):
            network = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        return add_adapters(network, AdapterConfig(rank=4))

    def load(self, data: SiteData, seed: int) -> Examples:
        if data.site == "site-3":
            capabilities.VERSION = "0.0.9"
        if data.site == "site-4":
            session.read_policy = lambda file: Policy(max_upload_bytes=200)
        x = torch.randn(40, 12, generator=torch.Generator().manual_seed(int(data.site[-1])))
        y = x[:, :3].sum(1, keepdim=True)
        return Examples(TensorDataset(x[8:], y[8:]), TensorDataset(x[:8], y[:8]))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def predict(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mse": float((predictions - targets).square().mean())}
