"""Age as a target: regression in years, standardised by constants that the job sets."""

from __future__ import annotations

from abc import ABC
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from .task import Metric, Task, TaskConfig


class AgeConfig(TaskConfig):
    """Standardisation of the age by constants, so that no site has to reveal its own statistics."""

    age_mean: float = Field(45.0, ge=0, le=120, description="age in years that the output 0 stands for")
    age_scale: float = Field(15.0, gt=0, le=120, description="years per unit of the network's output")
    loss: Literal["smooth_l1", "mse"] = Field(
        "smooth_l1", description="loss of the standardised age; FedSparsify uses mse"
    )


class AgeTask(Task, ABC):
    """A network with one output, the standardised age; batches are ``(inputs, age in years (B, 1))``."""

    config: AgeConfig
    metric = Metric("mae", "years", "min")
    kind = "regression"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the smooth L1 or the squared error of the standardised age, a scalar."""
        inputs, years = batch
        targets = (years - self.config.age_mean) / self.config.age_scale
        compute_error = functional.smooth_l1_loss if self.config.loss == "smooth_l1" else functional.mse_loss
        return compute_error(model(inputs), targets)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predicted and true age in years, both ``(B, 1)``."""
        inputs, years = batch
        return model(inputs) * self.config.age_scale + self.config.age_mean, years

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return mean absolute, root mean squared and mean signed error (``bias``: predicted minus true), in years."""
        error = (predictions - targets).double()
        return {
            "mae": error.abs().mean().item(),
            "rmse": torch.sqrt((error**2).mean()).item(),
            "bias": error.mean().item(),
        }
