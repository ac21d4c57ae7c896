"""Averaging of the sites' models: settings, and the server's step with its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import Field, model_validator
from torch import Tensor

from ...aggregation.robust import AggregationRule
from ...aggregation.server_step import (
    ModelAverage,
    ServerMemory,
    ServerOptimizer,
    take_server_step,
    update_model_average,
)
from ...exchange import Contribution
from ...mask import Mask
from ...params import Layout
from ..method import MethodConfig


class AveragingConfig(MethodConfig):
    """Settings of methods whose next model is an average of the sites' models."""

    aggregation: AggregationRule = Field(
        default_factory=AggregationRule, description="how the sites' updates are aggregated"
    )
    server: ServerOptimizer = Field(
        default_factory=ServerOptimizer, description="the server's step towards the average of the sites' models"
    )
    model_average: ModelAverage = Field(
        default_factory=ModelAverage,
        description="average of the models of several rounds, the result of the run in place of the last model",
    )

    @model_validator(mode="after")
    def _check_rule(self) -> AveragingConfig:
        if not self.server.is_average and self.aggregation.rule != "mean":
            raise ValueError(
                f"server.optimizer {self.server.optimizer} with server.lr {self.server.lr} is a step towards the mean; "
                f"leave server out with aggregation.rule {self.aggregation.rule}"
            )
        return self

    @property
    def min_sites_needed(self) -> int:
        return self.aggregation.min_sites_needed

    @property
    def continuation_blocker(self) -> str | None:
        if self.model_average.kind == "none" or self.model_average.start == 0:
            return super().continuation_blocker
        return "model_average.start is a share of method.rounds, so other models are averaged in a longer run"

    @property
    def masking_blocker(self) -> str | None:
        if self.aggregation.needs_single_updates:
            return f"aggregation.rule {self.aggregation.rule} compares the sites' values"
        return None

    @property
    def averaging_blocker(self) -> str | None:
        """Why the server must read single updates or the model; None where a sum is enough."""
        rule = self.aggregation.rule
        if self.aggregation.needs_single_updates:
            return f"aggregation.rule {rule} compares the sites' values"
        if not self.server.is_average:
            return f"server.optimizer {self.server.optimizer} steps from a model that the server reads"
        if self.model_average.kind != "none":
            return f"model_average: {self.model_average.kind} needs models that the server reads"
        return None


class FedAvgConfig(AveragingConfig):
    """Settings of methods whose server does nothing but average."""

    @property
    def encryption_blocker(self) -> str | None:
        return self.averaging_blocker

    @property
    def privacy_blocker(self) -> str | None:
        return None

    @property
    def quantization_blocker(self) -> str | None:
        if self.server.lr <= 2:
            return None
        return f"server.lr {self.server.lr} multiplies the rounding error of the download; set it to 2 or less"


@dataclass(frozen=True)
class AveragedState:
    """State of a method whose server averages one model.

    Attributes:
        round: the next round, 1-based.
        weights: float32 ``(P,)``.
        memory: what the server carries beside the model.
    """

    round: int
    weights: Tensor
    memory: ServerMemory = field(default_factory=ServerMemory)


class HasMemory(Protocol):
    """A state with a model and what the server carries beside it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def weights(self) -> Tensor:
        """float32 ``(P,)``."""

    @property
    def memory(self) -> ServerMemory:
        """What the server carries beside the model."""


StateT = TypeVar("StateT", bound=HasMemory)


def learn_average(
    state: AveragedState, contributions: Sequence[Contribution], config: AveragingConfig, layout: Layout
) -> AveragedState:
    """Return the state of FedAvg after a round.

    Args:
        state: the state before the round.
        contributions: the sites' weights, over the full mask.
        config: aggregation, step and average over rounds.
        layout: layout of the model.
    """
    weights, memory = take_server_step(
        contributions, state.weights, state.memory, config.aggregation, config.server, layout.trainable_size
    )
    live = Mask.full(layout.size)
    memory = update_model_average(memory, weights, live, config.model_average, state.round, config.rounds)
    return AveragedState(state.round + 1, weights, memory)


def finalize_average(state: StateT) -> StateT:
    """Return the state with the average of the models in place of the last model, where there is one."""
    average = state.memory.average
    return state if average is None else replace(state, weights=average)
