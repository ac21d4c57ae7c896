"""Averaging of the sites' models: settings, the server's step with its memory, and fine-tuning at the end.

Fine-tuning at each site after the last round, pulled to the global model; the fine-tuned model stays at the site.

Cheng et al. 2021, "Fine-tuning is Fine in Federated Learning", arXiv 2108.07313. The pull is that of Ditto (Li et al.
2021, arXiv 2012.04221); docs/algorithms.md, section 7.2.
"""

import logging
from abc import ABC
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar, cast

from pydantic import Field
from torch import Tensor

from ...core.errors import MetricsError
from ...core.exchange import EVALUATE, Contribution, Patch, Request, Update
from ...core.mask import Mask
from ...core.needs import Need, Needs
from ...core.settings import Settings
from ...training import Site, TrainingConfig
from ...training.personal import PERSONAL
from ..aggregation.server_step import (
    ModelAverage,
    ServerMemory,
    ServerOptimizer,
    take_server_step,
    update_model_average,
)
from ..method import Method, MethodConfig, ModelState
from .adaptation import PersonalTrainingDiverged, attribute_divergence, require_finite

_LOG = logging.getLogger(__name__)

FINE_TUNED = "fine-tuned at the site"
"""What a site's own model is."""
Strength = Annotated[float, Field(ge=0)]


class FineTuning(Settings):
    """Settings of the training at each site after the last round."""

    epochs: int = Field(1, ge=1)
    """epochs of fine-tuning at each site after the last round"""
    lr: float | None = Field(None, gt=0)
    """learning rate of fine-tuning; null: that of the last round"""
    proximal: Strength | Annotated[tuple[Strength, ...], Field(min_length=2)] | None = None
    """pull towards the global model (Ditto's lambda); several: each site takes the one with the best model on its
    validation examples, or the global model itself; null: training.proximal"""

    @property
    def has_choice(self) -> bool:
        """Whether each site chooses among several strengths."""
        return isinstance(self.proximal, tuple)

    def needs(self, training: TrainingConfig) -> Needs:
        """Return what fine-tuning needs of the other parts of a run, after rounds with the settings ``training``."""
        needs = {
            Need.OWN_MODEL.because(FINE_TUNED),
            Need.MORE_READS.because("fine-tuning trains once more, and the metrics of its model leave"),
        }
        if self.has_choice:
            choice = "finetune.proximal has several strengths, and a site evaluates a model of each"
            needs.add(Need.PACKAGE_STEPS.because(choice, "give finetune.proximal one value"))
            needs.add(Need.VALIDATION.because("finetune.proximal: validation examples decide", "give one value"))
        if self.lr is None and not training.has_constant_rate:
            needs.add(
                Need.LAST_ROUND.because(
                    "method.finetune.lr is that of the last round, and method.training lowers the rate over rounds "
                    "that the run may leave out",
                    "set method.finetune.lr",
                )
            )
        return frozenset(needs)

    def list_trainings(self, training: TrainingConfig, t: int) -> list[TrainingConfig]:
        """Return the settings of one training for each strength of the pull, the strongest first.

        Args:
            training: settings of the last round.
            t: the round after the last one.
        """
        lr = training.compute_learning_rate(t - 1) if self.lr is None else self.lr
        # The rate is that of this round already.
        base = training.model_copy(update={"epochs": self.epochs, "lr": lr, "lr_decay": 1.0})
        if self.proximal is None:
            return [base]
        strengths = self.proximal if isinstance(self.proximal, tuple) else (self.proximal,)
        return [base.model_copy(update={"proximal": strength}) for strength in sorted(strengths, reverse=True)]


def fine_tune(site: Site, trainable: Mask, trainings: Sequence[TrainingConfig], t: int) -> Tensor:
    """Fine-tune the received model ``site.weights`` and return the site's own model ``(P,)``.

    With several trainings, the model with the best metric on the site's validation examples is returned, among the
    received one and the result of each training; of equally good ones the first. A site without validation examples
    takes the first training. One that diverges is no candidate. The site's memory then holds the personal tensors of
    the returned model.

    Args:
        site: trains on its own examples.
        trainable: entries that may change.
        trainings: settings of each training.
        t: the round after the last one; seeds the order of the examples, which is the same in all trainings.

    Raises:
        PersonalTrainingDiverged: the only training diverged.
        TrainingDiverged: the received model has no finite loss.
        MetricsError: nor finite metrics on the validation examples.
    """
    if len(trainings) == 1:
        return _train(site, trainable, trainings[0], t)
    personal = site.memory.get(PERSONAL)
    chosen, best = None, _measure_validation(site, site.weights)
    chosen_weights, chosen_personal = site.weights, personal
    for training in trainings:
        # Each training starts from the memory of the request, as if it were the only one.
        _set_personal(site, personal)
        try:
            weights = _train(site, trainable, training, t)
            value = _measure_validation(site, weights)
        except (PersonalTrainingDiverged, MetricsError) as error:
            _LOG.warning("site %s: method.finetune.proximal %g: %s", site.name, training.proximal, error)
            continue
        is_better = chosen is None if value is None or best is None else site.trainer.task.metric.is_better(value, best)
        if is_better:
            chosen, best, chosen_weights, chosen_personal = training, value, weights, site.memory.get(PERSONAL)
    _set_personal(site, chosen_personal)
    return chosen_weights


def _train(site: Site, trainable: Mask, training: TrainingConfig, t: int) -> Tensor:
    """Return the weights ``(P,)`` after one fine-tuning of the received model."""
    with attribute_fine_tuning():
        return require_finite(site.train(site.weights, trainable, training, t))


def attribute_fine_tuning() -> AbstractContextManager[None]:
    """Attribute a divergence inside the block to the fine-tuning."""
    return attribute_divergence("fine-tuning", "method.finetune.lr or method.finetune.proximal")


def _measure_validation(site: Site, weights: Tensor) -> float | None:
    """Return the task's metric on the site's validation examples; None if it is not defined there."""
    metrics = site.trainer.evaluate_validation(weights)
    return metrics.get(site.trainer.task.metric.name) if metrics else None


def _set_personal(site: Site, values: Tensor | None) -> None:
    """Set the personal tensors in a site's memory; None: the site has none, or has not trained yet."""
    if values is None:
        site.memory.pop(PERSONAL, None)
    else:
        site.memory[PERSONAL] = values


FINETUNE = "finetune"
"""The kind of the last request: fine-tune the model and report the metrics of the result."""


class AveragingConfig(MethodConfig):
    """Settings of methods whose next model is an average of the sites' models."""

    server: ServerOptimizer = Field(default_factory=ServerOptimizer)
    """the server's step towards the average of the sites' models"""
    model_average: ModelAverage = Field(default_factory=ModelAverage)
    """average of the models of several rounds, the result of the run in place of the last model"""
    finetune: FineTuning | None = None
    """training at each site after the last round, whose model stays there; null: none"""

    def needs(self) -> Needs:
        """Return the needs of the average and the fine-tuning: a mean itself has none."""
        needs = self.model_average.needs() | (self.finetune.needs(self.training) if self.finetune else frozenset())
        if self.server.lr <= 2:
            return needs
        reason = f"server.lr {self.server.lr} multiplies the rounding error of the download"
        return needs | {Need.EXACT_MODEL.because(reason, "set it to 2 or less")}


@dataclass(frozen=True)
class AveragedState(ModelState):
    """State of a method whose server averages one model.

    Attributes:
        memory: what the server carries beside the model.
    """

    memory: ServerMemory = field(default_factory=ServerMemory, kw_only=True)


ConfigT = TypeVar("ConfigT", bound=AveragingConfig)
StateT = TypeVar("StateT", bound=AveragedState)


class AveragingMethod(Method[ConfigT, StateT], ABC):
    """A method whose next model is an average of the sites' models.

    With ``finetune``, every site fine-tunes the result for itself and reports the metrics of its own model, which stays
    there.
    """

    final_kinds = frozenset({FINETUNE})

    def init(self, weights: Tensor, sites: Sequence[str]) -> StateT:
        return cast(StateT, AveragedState(1, weights))

    def learn(self, state: StateT, contributions: Sequence[Contribution]) -> StateT:
        config = self.config
        weights, memory = take_server_step(
            contributions, state.weights, state.memory, config.server, self.layout.num_parameters
        )
        new = self.restrict(state, replace(state, weights=weights), contributions)
        live = self.model(new).mask
        memory = update_model_average(memory, new.weights, live, config.model_average, state.round, config.rounds)
        return replace(new, round=state.round + 1, memory=memory)

    def restrict(self, state: StateT, stepped: StateT, contributions: Sequence[Contribution]) -> StateT:
        """Return the state after the server's step with what the method does to its model, by default nothing.

        Args:
            state: the state before the round.
            stepped: the same with the weights after the step.
            contributions: the updates of the round.
        """
        return stepped

    def count_requests(self, kind: str, t: int) -> int:
        # A site whose copy of the job provides for no fine-tuning does not train once more, however the server asks.
        return 0 if kind == FINETUNE and self.config.finetune is None else super().count_requests(kind, t)

    @property
    def final_kind(self) -> str:
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
        """Return the state with the average of the models in place of the last model, where there is one."""
        average = state.memory.average
        return state if average is None else replace(state, weights=average)

    def describe(self, state: StateT | None = None) -> str:
        average = self.config.model_average
        if state is None or average.kind == "none" or state.memory.average is not None:
            return ""
        return (
            f"the run ended before the first averaged round (model_average.start {average.start:g} of "
            f"{self.config.rounds} rounds): its model is the last one, no average; lower model_average.start"
        )
