"""Averaging of the sites' models: settings, and FedAvg's server step."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator
from torch import Tensor

from ...aggregation.robust import AggregationRule, aggregate
from ...aggregation.weighted import apply_deltas, weigh_by_examples
from ...exchange import Contribution
from ..method import MethodConfig


class AveragingConfig(MethodConfig):
    """Settings of methods whose next model is an average of the sites' models."""

    aggregation: AggregationRule = Field(
        default_factory=AggregationRule, description="how the sites' updates are aggregated"
    )

    @property
    def min_sites_needed(self) -> int:
        return self.aggregation.min_sites_needed

    @property
    def aggregation_blocker(self) -> str | None:
        """Why ``aggregation`` must read single updates; None where a sum is enough."""
        rule = self.aggregation.rule
        return f"aggregation.rule {rule} compares the sites' values" if self.aggregation.needs_single_updates else None


class ServerStepConfig(AveragingConfig):
    """Settings of FedAvg's server."""

    server_lr: float = Field(
        1.0, gt=0, description="step size of the server towards the average; the number of sites adds their deltas up"
    )

    @model_validator(mode="after")
    def _check_rule(self) -> ServerStepConfig:
        if self.server_lr != 1 and self.aggregation.rule != "mean":
            raise ValueError(
                f"server_lr {self.server_lr} is a step towards the mean; leave it at 1 with {self.aggregation.rule}"
            )
        return self

    @property
    def encryption_blocker(self) -> str | None:
        if self.aggregation_blocker or self.server_lr == 1:
            return self.aggregation_blocker
        return f"server_lr {self.server_lr} is a step from a model that the server reads"

    @property
    def quantization_blocker(self) -> str | None:
        if self.server_lr <= 2:
            return None
        return f"server_lr {self.server_lr} multiplies the rounding error of the download; set it to 2 or less"


def take_server_step(
    contributions: Sequence[Contribution], weights: Tensor, config: ServerStepConfig, trainable_size: int
) -> Tensor:
    """Return the next weights ``(P,)``: a step of size ``server_lr`` from ``weights`` towards the average.

    Args:
        contributions: the sites' weights.
        weights: ``(P,)`` the current model.
        config: aggregation and step size.
        trainable_size: number of parameters; the entries behind them are running statistics.
    """
    average, step = aggregate(contributions, weights, config.aggregation), config.server_lr
    if step != 1:
        # Running statistics are always averaged: an extrapolated variance could be negative.
        stepped = apply_deltas(contributions, lambda us: [step * share for share in weigh_by_examples(us)], weights)
        average[:trainable_size] = stepped[:trainable_size]
    return average
