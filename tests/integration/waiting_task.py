"""One site trains for seconds; the others record the polling intervals that the server gives them meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from nvflare.private.fed.client.client_runner import ClientRunner
from torch import nn
from torch.utils.data import TensorDataset

from flare_sparse import Examples, Metric, SiteData, Task

# Several times as long as the server holds a request.
TRAINING_S = 6.0


class WaitingTask(Task):
    """Each site runs in its own process, so that ``load`` changes that site only."""

    metric = Metric("mse", "", "min")
    slow = False

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def load(self, data: SiteData, seed: int) -> Examples:
        self.slow = data.site == "site-1"
        record_waits(Path(data.path) / "waits.txt")
        x = torch.ones(8, 4)
        return Examples(TensorDataset(x, x[:, :1]), TensorDataset(x, x[:, :1]))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.slow:
            time.sleep(TRAINING_S)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mse": float((predictions - targets).square().mean())}


def record_waits(file: Path) -> None:
    """Write a line per request: seconds since the last work and until the next request, and whether there was work."""
    fetch = ClientRunner.fetch_and_run_one_task
    last = [time.monotonic()]

    def fetch_and_record(runner: ClientRunner, fl_ctx: Any) -> tuple[float, bool]:
        wait, worked = fetch(runner, fl_ctx)
        if worked:
            last[0] = time.monotonic()
        with file.open("a") as lines:
            lines.write(f"{time.monotonic() - last[0]} {wait} {worked:d}\n")
        return wait, worked

    ClientRunner.fetch_and_run_one_task = fetch_and_record
