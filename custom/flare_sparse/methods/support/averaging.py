"""Averaging of the sites' models: settings, the server's step with its memory, and fine-tuning at the end."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import Field, model_validator
from torch import Tensor

from ...core.exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update
from ...core.mask import Mask
from ...core.needs import Need, Needs
from ...training import Site
from ..aggregation.robust import AggregationRule
from ..aggregation.server_step import (
    ModelAverage,
    ServerMemory,
    ServerOptimizer,
    take_server_step,
    update_model_average,
)
from ..method import Method, MethodConfig, broadcast
from .finetuning import FineTuning, attribute_fine_tuning, fine_tune

FINETUNE = "finetune"
"""The kind of the last request: fine-tune the model and report the metrics of the result."""


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
    finetune: FineTuning | None = Field(
        None, description="training at each site after the last round, whose model stays there; null: none"
    )

    @model_validator(mode="after")
    def _check_rule(self) -> AveragingConfig:
        if not self.server.is_average and self.aggregation.rule != "mean":
            raise ValueError(
                f"server.optimizer {self.server.optimizer} with server.lr {self.server.lr} is a step towards the mean; "
                f"leave server out with aggregation.rule {self.aggregation.rule}"
            )
        return self

    def needs(self) -> Needs:
        """Return the needs of the rule, the step, the average and the fine-tuning: an average itself has none."""
        finetuning = self.finetune.needs(self.training) if self.finetune else frozenset()
        return self.aggregation.needs() | self.server.needs() | self.model_average.needs() | finetuning


class FedAvgConfig(AveragingConfig):
    """Settings of methods whose server does nothing but average."""

    def needs(self) -> Needs:
        if self.server.lr <= 2:
            return super().needs()
        reason = f"server.lr {self.server.lr} multiplies the rounding error of the download"
        return super().needs() | {Need.EXACT_MODEL.because(reason, "set it to 2 or less")}


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
    """A state with a round, a model and what the server carries beside it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def round(self) -> int:
        """The next round, 1-based; 0 before training."""

    @property
    def weights(self) -> Tensor:
        """float32 ``(P,)``."""

    @property
    def memory(self) -> ServerMemory:
        """What the server carries beside the model."""


ConfigT = TypeVar("ConfigT", bound=AveragingConfig)
StateT = TypeVar("StateT", bound=HasMemory)


class AveragingMethod(Method[ConfigT, StateT], ABC):
    """A method whose next model is an average of the sites' models.

    With ``finetune``, every site fine-tunes the result for itself and reports the metrics of its own model, which stays
    there.
    """

    final_kinds = frozenset({FINETUNE})

    def count_requests(self, kind: str, t: int) -> int:
        # A site whose copy of the job provides for no fine-tuning does not train once more, however the server asks.
        return 0 if kind == FINETUNE and self.config.finetune is None else super().count_requests(kind, t)

    @property
    def final_kind(self) -> str:
        """Kind of the last request."""
        return EVALUATE if self.config.finetune is None else FINETUNE

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != FINETUNE:
            return super().answer(request, site)
        own = self._fine_tune(site, request.trainable)
        # A site may keep the received model, where every training diverged or was no better.
        with nullcontext() if own is site.weights else attribute_fine_tuning():
            metrics = site.evaluate(own)
        return Update(Patch.empty(self.layout.size), "metrics", site.num_examples, metrics)

    def adapt(self, site: Site, trainable: Mask) -> Tensor:
        return super().adapt(site, trainable) if self.config.finetune is None else self._fine_tune(site, trainable)

    def _fine_tune(self, site: Site, trainable: Mask) -> Tensor:
        """Return the site's own model ``(P,)``."""
        assert self.config.finetune is not None, "a site answers no request to fine-tune otherwise"
        t = self.config.rounds + 1
        return fine_tune(site, trainable, self.config.finetune.list_trainings(self.config.get_training(t), t), t)

    def finalize(self, state: StateT) -> StateT:
        return finalize_average(state)

    def describe(self, state: StateT | None = None) -> str:
        average = self.config.model_average
        if state is None or average.kind == "none" or state.memory.average is not None:
            return ""
        return (
            f"the run ended before the first averaged round (model_average.start {average.start:g} of "
            f"{self.config.rounds} rounds): its model is the last one, no average; lower model_average.start"
        )

    def ask_final(self, state: StateT, sites: Sequence[str]) -> dict[str, Assignment]:
        model = self.model(state)
        return broadcast(sites, Assignment(Request(self.final_kind, self.config.rounds + 1, model, model.mask)))


class FedAvgRounds(AveragingMethod[FedAvgConfig, AveragedState]):
    """Rounds in which every site trains the whole model, and the server takes a step towards their average."""

    trains_all_entries = True

    def init(self, weights: Tensor, sites: Sequence[str]) -> AveragedState:
        return AveragedState(1, weights)

    def learn(self, state: AveragedState, contributions: Sequence[Contribution]) -> AveragedState:
        config, size = self.config, self.layout.num_parameters
        weights, memory = take_server_step(
            contributions, state.weights, state.memory, config.aggregation, config.server, size
        )
        live = Mask.full(self.layout.size)
        memory = update_model_average(memory, weights, live, config.model_average, state.round, config.rounds)
        return AveragedState(state.round + 1, weights, memory)

    def model(self, state: AveragedState) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))


def finalize_average(state: StateT) -> StateT:
    """Return the state with the average of the models in place of the last model, where there is one."""
    average = state.memory.average
    return state if average is None else replace(state, weights=average)
