"""What the server does with the average of a round: an optimiser's step towards it, and an average over rounds.

Both act on the live entries alone, so that entries which a mask switched off stay zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.exchange import Contribution
from ...core.mask import Mask, floor_fraction
from ...core.needs import Need, Needs
from ...core.settings import Settings
from .weighted import sum_deltas, weigh_by_examples, weighted_sum


class ServerOptimizer(Settings):
    """The server's step from the current model towards the average of the sites' models.

    "Adaptive Federated Optimization" (Reddi et al. 2021), arXiv 2003.00295, Algorithm 2; docs/algorithms.md, section
    1.13.
    """

    optimizer: Literal["sgd", "momentum", "adam", "yogi"] = "sgd"
    """sgd: FedAvg; momentum: FedAvgM; adam: FedAdam; yogi: FedYogi"""
    lr: float = Field(1.0, gt=0)
    """step size of the server; sgd: 1 is the average, and the number of sites adds their deltas up; adam and yogi move
    an entry by at most about lr"""
    beta1: float = Field(0.9, ge=0, lt=1)
    """momentum, adam, yogi: decay of the mean of the deltas"""
    beta2: float = Field(0.99, ge=0, lt=1)
    """adam, yogi: decay of the mean of the squared deltas"""
    tau: float = Field(1e-3, gt=0)
    """adam, yogi: smallest divisor of a step; smaller adapts more"""

    @model_validator(mode="after")
    def _check_lr(self) -> Self:
        # A default of 1 would move every entry by about 1 a round, which no network survives.
        if self.is_adaptive and "lr" not in self.model_fields_set:
            raise ValueError(
                f"lr is missing: {self.optimizer} moves an entry by about lr a round; set it, such as 0.01"
            )
        return self

    @property
    def is_adaptive(self) -> bool:
        """Whether each entry has a step size of its own."""
        return self.optimizer in ("adam", "yogi")

    @property
    def is_average(self) -> bool:
        """Whether the next model is the average itself."""
        return self.optimizer == "sgd" and self.lr == 1


class ModelAverage(Settings):
    """Average of the models of several rounds, which is the result of the run in place of the last model."""

    kind: Literal["none", "ema", "swa"] = "none"
    """ema: exponential moving average; swa: equal weights (stochastic weight averaging)"""
    decay: float = Field(0.8, ge=0, lt=1)
    """ema: weight of the average so far against a round's model"""
    start: float = Field(0.5, ge=0, lt=1)
    """share of the rounds before the first that is averaged"""

    def compute_weight(self, t: int, rounds: int) -> float:
        """Return the weight of the model of round ``t``, 1-based, in the average; 0: the round is not averaged.

        >>> [round(ModelAverage(kind="swa", start=0.5).compute_weight(t, 6), 2) for t in range(1, 7)]
        [0.0, 0.0, 0.0, 1.0, 0.5, 0.33]
        """
        number = t - floor_fraction(self.start, rounds)
        if self.kind == "none" or number < 1:
            return 0.0
        if number == 1:
            return 1.0
        return 1 - self.decay if self.kind == "ema" else 1 / number

    def needs(self) -> Needs:
        """Return what the average needs of the other parts of a run."""
        if self.kind == "none" or self.start == 0:
            return frozenset()
        reason = "model_average.start is a share of method.rounds, so other models are averaged in a longer run"
        return frozenset({Need.NUMBER_OF_ROUNDS.because(reason)})


@dataclass(frozen=True)
class ServerMemory:
    """What the server carries from round to round beside the model; a checkpoint holds it with the method's state.

    Attributes:
        momentum: ``(P,)`` m, mean of the deltas.
        variance: ``(P,)`` v, mean of the squared deltas.
        average: ``(P,)`` average of the models so far.
    """

    momentum: Tensor | None = None
    variance: Tensor | None = None
    average: Tensor | None = None


def take_server_step(
    contributions: Sequence[Contribution],
    weights: Tensor,
    memory: ServerMemory,
    optimizer: ServerOptimizer,
    num_parameters: int,
) -> tuple[Tensor, ServerMemory]:
    """Return the next weights ``(P,)`` and the server's memory after the step.

    Args:
        contributions: the sites' weights, all over one mask unless the optimiser is the plain average.
        weights: ``(P,)`` the current model.
        memory: the server's memory before the step.
        optimizer: how far the model moves towards their average.
        num_parameters: number of parameters; the entries behind them are running statistics.

    Raises:
        OverflowError: the deltas are so large that the memory would not be finite.
    """
    average = weighted_sum(contributions, weigh_by_examples)
    if optimizer.is_average:
        return average, memory
    mask, delta = sum_deltas(contributions, weigh_by_examples, weights)
    direction, memory = find_direction(delta, mask, memory, optimizer)
    stepped = mask.put((mask.take(weights).double() + optimizer.lr * direction).float(), weights.clone())
    # Running statistics are always averaged: an extrapolated variance could be negative.
    average[:num_parameters] = stepped[:num_parameters]
    return average, memory


def find_direction(
    delta: Tensor, mask: Mask, memory: ServerMemory, optimizer: ServerOptimizer
) -> tuple[Tensor, ServerMemory]:
    """Return what times lr is the step, for the entries of the mask, and the memory; moments elsewhere become zero.

    Algorithm 2 has no bias correction; it starts with m = 0 and v = tau^2. In float64: v may be as small as 1e-12, and
    Yogi subtracts squares of nearly equal size.
    """
    if optimizer.optimizer == "sgd":
        return delta, memory
    zeros = torch.zeros(mask.size)
    before = torch.zeros_like(delta) if memory.momentum is None else mask.take(memory.momentum).double()
    # FedAvgM is SGD with momentum on the server (Hsu et al. 2019), whose delta has the weight 1.
    share = 1 - optimizer.beta1 if optimizer.is_adaptive else 1.0
    momentum = optimizer.beta1 * before + share * delta
    memory = replace(memory, momentum=mask.put(momentum.float(), zeros.clone()))
    if not optimizer.is_adaptive:
        return momentum, memory
    start = torch.full_like(delta, optimizer.tau**2)
    variance = start if memory.variance is None else mask.take(memory.variance).double()
    variance = _update_variance(variance, delta, optimizer)
    stored = _require_finite(mask.put(variance.float(), zeros))
    return momentum / (variance.sqrt() + optimizer.tau), replace(memory, variance=stored)


def _require_finite(memory: Tensor) -> Tensor:
    """Return a vector of the server's memory.

    Raises:
        OverflowError: a value is infinite or NaN.
    """
    # The model itself may be finite: an infinite v makes every later step of its entry 0, and nothing else shows it.
    if not bool(torch.isfinite(memory).all()):
        raise OverflowError("the squares of the deltas, or the average of the models, exceed float32")
    return memory


def _update_variance(before: Tensor, delta: Tensor, optimizer: ServerOptimizer) -> Tensor:
    """Return v of Algorithm 2: lines 12 (FedYogi) and 13 (FedAdam)."""
    square, beta2 = delta.square(), optimizer.beta2
    if optimizer.optimizer == "yogi":
        return before - (1 - beta2) * square * (before - square).sign()
    return beta2 * before + (1 - beta2) * square


def update_model_average(
    memory: ServerMemory, weights: Tensor, live: Mask, averaging: ModelAverage, t: int, rounds: int
) -> ServerMemory:
    """Return the memory with the average of the models up to that of round ``t``.

    Args:
        memory: the server's memory.
        weights: ``(P,)`` the model after the round's step and pruning.
        live: entries of the model that are on.
        averaging: which models are averaged.
        t: the round, 1-based.
        rounds: rounds of the run.

    Raises:
        OverflowError: the average would not be finite.
    """
    weight = averaging.compute_weight(t, rounds)
    if weight == 0:
        return memory
    previous = weights if memory.average is None else memory.average
    # The average has the mask of the newest model: a pruned entry must not keep a fraction of its earlier value.
    return replace(memory, average=_require_finite(torch.lerp(previous, weights, weight) * live.bits))
