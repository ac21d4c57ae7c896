"""What the server does with a round: the rule of its average, an optimiser's step towards it, an average over rounds.

Step and average over rounds act on the live entries alone, so that entries which a mask switched off stay zero.

Robust rules are statistics per entry, over the sites that sent it, which a few bad sites cannot move far. Rules over
Euclidean distances (Krum, geometric median) are left out on purpose: sparse updates whose masks hardly overlap are all
far from each other, whether they are honest or not.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.exchange import Contribution, Patch
from ...core.mask import Mask, floor_fraction
from ...core.needs import Need, Needs
from ...core.settings import Settings
from .weighted import apply_deltas, sum_deltas, weigh_by_examples, weighted_sum

# Entries processed at once: bounds the memory of the sorted float64 copies to a few MiB per site.
_CHUNK = 2**18


class AggregationRule(Settings):
    """How contributions become one model."""

    rule: Literal["mean", "median", "trimmed_mean"] = "mean"
    """mean: weighted by examples; median and trimmed_mean: per entry, each site counts once"""
    trim: float = Field(0.1, gt=0, lt=0.5)
    """share of the sites that trimmed_mean leaves out at each end"""
    min_owners: int = Field(3, ge=2)
    """fewest sites that must send an entry for it to change; not for mean"""

    @property
    def needs_single_updates(self) -> bool:
        """Whether the server must read each site's own values."""
        return self.rule != "mean"

    @property
    def min_sites_needed(self) -> int:
        """Fewest contributions with which the rule protects from one bad site."""
        if self.rule == "trimmed_mean":
            return max(self.min_owners, math.ceil(1 / self.trim))
        return self.min_owners if self.rule == "median" else 1

    def needs(self) -> Needs:
        """Return what the rule needs of the other parts of a run."""
        if not self.needs_single_updates:
            return frozenset()
        return frozenset(
            {
                Need.SINGLE_UPDATES.because(
                    f"aggregation.rule {self.rule} compares the sites' values", "set aggregation.rule to mean"
                ),
                Need.QUORUM.because(f"aggregation.rule {self.rule}", amount=self.min_sites_needed),
            }
        )


def aggregate(contributions: Sequence[Contribution], previous: Tensor, rule: AggregationRule) -> Tensor:
    """Return the new weights ``(P,)``.

    Args:
        contributions: one per site, of content ``weights``.
        previous: ``(P,)`` values of the entries that fewer than ``min_owners`` sites sent.
        rule: ``mean`` is :func:`~flare_sparse.methods.aggregation.weighted.weighted_sum`, bit for bit.
    """
    if rule.rule == "mean":
        return weighted_sum(contributions, weigh_by_examples)
    shared = contributions[0].patch.mask
    has_one_mask = all(contribution.patch.mask == shared for contribution in contributions)
    support = shared if has_one_mask else type(shared).full(shared.size)
    fallback = previous[support.indices]
    chunks = _iterate_chunks(contributions, support.indices, fallback, shared.size)
    results = [_aggregate_chunk(rows, chunk_fallback, rule) for rows, chunk_fallback in chunks]
    # Entries outside a common mask are pruned: they become zero, and do not keep the value that they had.
    return support.put(torch.cat(results) if results else fallback, previous.clone() * support.bits)


def _iterate_chunks(
    contributions: Sequence[Contribution], indices: Tensor, fallback: Tensor, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield values ``(sites, entries)``, NaN where a site did not send an entry, and the entries' fallback."""
    vectors = []
    for contribution in sorted(contributions, key=lambda contribution: contribution.site):
        vector = torch.full((size,), math.nan)
        vectors.append(contribution.patch.mask.put(contribution.patch.values, vector))
    for start in range(0, indices.numel(), _CHUNK):
        chunk = indices[start : start + _CHUNK]
        yield torch.stack([vector[chunk] for vector in vectors]), fallback[start : start + _CHUNK]


def _aggregate_chunk(rows: Tensor, fallback: Tensor, rule: AggregationRule) -> Tensor:
    """Return the median or the trimmed mean ``(entries,)`` of ``rows`` ``(sites, entries)``."""
    owners = (~rows.isnan()).sum(0)
    # NaN sorts last: the values of an entry's owners have the ranks 0 to owners - 1.
    ordered = rows.double().sort(dim=0).values.nan_to_num(0.0)
    # A median is a mean trimmed to the one or two middle values. The float32 product of a share and a tensor of counts
    # may fall below the integer that is meant, so the counts are looked up.
    counts = torch.tensor([floor_fraction(rule.trim, number) for number in range(rows.shape[0] + 1)])
    trimmed = (owners - 1) // 2 if rule.rule == "median" else counts[owners]
    rank = torch.arange(rows.shape[0]).unsqueeze(1)
    is_inner = (rank >= trimmed) & (rank < owners - trimmed)
    mean = (ordered * is_inner).sum(0) / is_inner.sum(0).clamp_min(1)
    # With few owners, one bad site would be a large part of the statistic.
    return torch.where(owners >= rule.min_owners, mean.float(), fallback)


def clip_deltas(
    contributions: Sequence[Contribution], previous: Tensor, limit: float | None
) -> tuple[list[Contribution], dict[str, float]]:
    """Clip each site's delta to an L2 norm.

    Args:
        contributions: the delta of weights is measured from ``previous``; contents other than weights and deltas stay.
        previous: ``(P,)`` the weights that the sites started from.
        limit: largest L2 norm; None: no bound.

    Returns:
        The contributions, and by site the norm that each clipped delta had.
    """
    if limit is None:
        return list(contributions), {}
    clipped, norms = [], {}
    for contribution in contributions:
        patch = contribution.patch
        if contribution.content not in ("weights", "delta"):
            clipped.append(contribution)
            continue
        start = patch.mask.take(previous) if contribution.content == "weights" else torch.zeros(())
        delta = patch.values - start
        # float64: the square of a float32 above 1.8e19 overflows, and an infinite norm would clip the delta to zero.
        norm = float(delta.double().square().sum().sqrt())
        if norm > limit:
            norms[contribution.site] = norm
            clipped.append(replace(contribution, patch=Patch(start + delta * (limit / norm), patch.mask)))
        else:
            clipped.append(contribution)
    return clipped, norms


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
    rule: AggregationRule,
    optimizer: ServerOptimizer,
    num_parameters: int,
) -> tuple[Tensor, ServerMemory]:
    """Return the next weights ``(P,)`` and the server's memory after the step.

    Args:
        contributions: the sites' weights, all over one mask unless the optimiser is the plain average.
        weights: ``(P,)`` the current model.
        memory: the server's memory before the step.
        rule: how the updates are aggregated.
        optimizer: how far the model moves towards their average.
        num_parameters: number of parameters; the entries behind them are running statistics.

    Raises:
        OverflowError: the deltas are so large that the memory would not be finite.
    """
    average = aggregate(contributions, weights, rule)
    if optimizer.is_average:
        return average, memory
    if optimizer.optimizer == "sgd":
        share = optimizer.lr
        stepped = apply_deltas(contributions, lambda us: [share * weight for weight in weigh_by_examples(us)], weights)
    else:
        stepped, memory = _take_adaptive_step(contributions, weights, memory, optimizer)
    # Running statistics are always averaged: an extrapolated variance could be negative.
    average[:num_parameters] = stepped[:num_parameters]
    return average, memory


def _take_adaptive_step(
    contributions: Sequence[Contribution], weights: Tensor, memory: ServerMemory, optimizer: ServerOptimizer
) -> tuple[Tensor, ServerMemory]:
    """Return the weights ``(P,)`` after a step of FedAvgM, FedAdam or FedYogi, and its moments.

    Entries outside the contributions' mask keep their weights, and their moments become zero.
    """
    # Algorithm 2 has no bias correction; it starts with m = 0 and v = tau^2. In float64: v may be as small as 1e-12,
    # and Yogi subtracts squares of nearly equal size.
    mask, delta = sum_deltas(contributions, weigh_by_examples, weights)
    previous = torch.zeros_like(delta) if memory.momentum is None else mask.take(memory.momentum).double()
    # FedAvgM is SGD with momentum on the server (Hsu et al. 2019), whose delta has the weight 1.
    share = 1 - optimizer.beta1 if optimizer.is_adaptive else 1.0
    momentum = optimizer.beta1 * previous + share * delta
    stored = mask.put(momentum.float(), torch.zeros_like(weights))
    if not optimizer.is_adaptive:
        values = mask.take(weights).double() + optimizer.lr * momentum
        return mask.put(values.float(), weights.clone()), replace(memory, momentum=stored)
    before = mask.take(memory.variance).double() if memory.variance is not None else None
    variance = _update_variance(
        torch.full_like(delta, optimizer.tau**2) if before is None else before, delta, optimizer
    )
    values = mask.take(weights).double() + optimizer.lr * momentum / (variance.sqrt() + optimizer.tau)
    stored_variance = _require_finite(mask.put(variance.float(), torch.zeros_like(weights)))
    return mask.put(values.float(), weights.clone()), replace(memory, momentum=stored, variance=stored_variance)


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
