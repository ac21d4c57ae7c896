"""Top-k with error feedback (Stich et al. 2018), Algorithm 1 (Mem-SGD): large entries are sent, the rest is kept.

"Sparsified SGD with Memory", arXiv 1809.07599; docs/algorithms.md, section 7.4. With ``down`` the server selects and
keeps, too, and ``decay`` shrinks what is kept, by a factor as in SparseLoCo (arXiv 2508.15706), or with the learning
rate: what a large step of an early round left would undo the small ones at the end.

Buffers are exchanged whole. Memory is for gradients, whose sum over rounds is a long step in the right direction. A
running statistic moves to the site's own value in every round, so that the sum of its deltas leads past that value, and
a variance below 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..compute.structure.nodes import clip_variances
from ..core.errors import ConfigError
from ..core.exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..core.mask import Mask, find_top_k, floor_fraction
from ..core.needs import Need, Needs
from ..core.params import Layout
from ..inputs.scaling import build_statistics_mask
from ..training import Site
from ..wire.encodings import count_entries_within
from ..wire.number_format import NumberFormat
from .aggregation.server_step import (
    ModelAverage,
    ServerMemory,
    ServerOptimizer,
    find_direction,
    update_model_average,
)
from .aggregation.weighted import weigh_by_examples, weighted_sum
from .method import Method, MethodConfig, ModelState, broadcast
from .support.masks import unite_masks


class TopKEFConfig(MethodConfig):
    fraction: float = Field(0.1, gt=0, le=1)
    """share of all entries that a site uploads in a round, running statistics not included"""
    down: float | None = Field(None, gt=0, le=1)
    """share of all entries that the server sends in a round after the first, running statistics not included; it keeps
    the rest for later rounds; null: all that the round changed"""
    budget: float | None = Field(None, gt=0, le=1)
    """in place of fraction and down: bytes of a message, up and down, as a share of those of the dense model in
    float32"""
    decay: Annotated[float, Field(ge=0, le=1)] | Literal["rate"] = 1.0
    """factor of what a site, and with down the server, has kept, before it is added; rate, the default with budget: the
    learning rate of this round over that of the round in which it was kept"""
    server: ServerOptimizer = Field(default_factory=ServerOptimizer)
    """the server's step along the mean of the deltas; with a memory of its own it changes every entry, of which down
    sends the largest changes"""
    model_average: ModelAverage = Field(default_factory=ModelAverage)
    """average of the models of several rounds, the result of the run in place of the last model"""

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.budget is not None and (given := {"fraction", "down"} & self.model_fields_set):
            raise ValueError(f"budget gives the shares of both directions; remove it, or {' and '.join(sorted(given))}")
        return self

    def fit(self, layout: Layout, values: NumberFormat) -> Self:
        if self.budget is None:
            return self
        allowed = self.budget * 4 * layout.size
        buffers = layout.size - layout.num_parameters - build_statistics_mask(layout).count
        if not (count := count_entries_within(allowed, layout.num_parameters, buffers, values)):
            raise ConfigError(
                f"method.budget is {self.budget:g}, {allowed:.0f} bytes a message of this model, which its header, its "
                "buffers and one entry exceed; raise it, or send FedAvg's model, which is small"
            )
        # Express counts as shares of all entries, half an entry up, so that their floor gives the counts again.
        share = min(1.0, (count + 0.5) / layout.size)
        own = {"fraction": share, "down": share}
        return self.model_copy(update=own if "decay" in self.model_fields_set else own | {"decay": "rate"})

    def compute_decay(self, t: int, last: int) -> float:
        """Return the factor in round ``t`` of what was kept in round ``last``."""
        if self.decay != "rate":
            return self.decay
        rate, last_rate = (self.get_training(number).compute_learning_rate(number) for number in (t, last))
        # A rate that rises, as in a warm-up, makes nothing of what was kept larger.
        return min(rate / last_rate, 1.0)

    def needs(self) -> Needs:
        own = Need.OWN_ENTRIES.because("each site sends its largest changes")
        return frozenset({own, Need.MORE_READS.because()}) | self.model_average.needs()


@dataclass(frozen=True)
class TopKEFState(ModelState):
    """The model and the entries of its last change.

    Attributes:
        changed: the entries that the last round changed; sites that took part in it hold all others.
        residual: ``(P,)`` what the server keeps of the sites' deltas; None: nothing, it sends all.
        memory: moments of the server's step, and the average of the models.
    """

    changed: Mask
    residual: Tensor | None = None
    memory: ServerMemory = field(default_factory=ServerMemory)


@final
class TopKEF(Method[TopKEFConfig, TopKEFState]):
    """Sites receive the changed entries and return the largest ``fraction`` of delta plus residual, and all buffers."""

    name = "topk_ef"
    Config = TopKEFConfig
    update_content = "delta"
    trains_all_entries = True

    def init(self, weights: Tensor, sites: Sequence[str]) -> TopKEFState:
        residual = None if self.config.down is None else torch.zeros_like(weights)
        return TopKEFState(1, weights, Mask.full(self.layout.size), residual)

    def build_assignment(self, kind: str, state: TopKEFState) -> Assignment:
        changed = Patch.from_vector(state.weights, state.changed, "previous" if state.round > 1 else "zeros")
        model = self.model(state)
        return Assignment(
            Request(kind, state.round, changed, model.mask),
            UpdateSpec(self.update_content, min_entries=lambda _: self.upload_size),
            full_model=model,
        )

    def ask_final(self, state: TopKEFState, sites: Sequence[str]) -> dict[str, Assignment]:
        # Sites of the last round lack its change alone.
        return broadcast(sites, self.build_assignment(EVALUATE, state))

    @property
    def upload_size(self) -> int:
        """Number of parameters in an update."""
        return self._count(self.config.fraction)

    def answer(self, request: Request, site: Site) -> Update:
        training = self.config.get_training(request.round)
        start = site.start
        delta = site.train(start, request.trainable, training, request.round) - start
        # The server need not ask a site in every round.
        decay = self.config.compute_decay(request.round, int(site.memory.get("last_round", request.round)))
        mask, kept = self._split(delta, site.memory.get("residual"), decay, self.config.fraction)
        site.memory.update(residual=kept, last_round=torch.tensor(request.round))
        return Update(Patch.from_vector(delta, mask), self.update_content, site.num_examples)

    def learn(self, state: TopKEFState, contributions: Sequence[Contribution]) -> TopKEFState:
        step, memory = self._take_step(contributions, state)
        residual = None
        if self.config.down is None:
            sent = unite_masks(contribution.patch.mask for contribution in contributions)
            changed = sent if self.config.server.is_average else sent | Mask(step != 0)
        else:
            decay = self.config.compute_decay(state.round, state.round - 1)
            changed, residual = self._split(step, state.residual, decay, self.config.down)
            step = step * changed.bits
        # A mean of variances, unless a short number format has rounded the deltas, or a site makes them up.
        weights = clip_variances(state.weights + step, Mask.full(self.layout.size), self.layout)
        average, live = self.config.model_average, Mask.full(self.layout.size)
        memory = update_model_average(memory, weights, live, average, state.round, self.config.rounds)
        return TopKEFState(state.round + 1, weights, changed, residual, memory)

    def finalize(self, state: TopKEFState) -> TopKEFState:
        # Sites hold none of the entries of an average.
        average = state.memory.average
        return state if average is None else replace(state, weights=average, changed=Mask.full(self.layout.size))

    def model(self, state: TopKEFState) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))

    def describe(self, state: TopKEFState | None = None) -> str:
        optimizer = self.config.get_training(1).optimizer
        if state is not None or optimizer == "sgd" or self.config.fraction > 0.05:
            return ""
        return (
            f"{optimizer} begins anew in every round and moves each entry by about its rate, so that the largest may "
            "tell little; compare method.training.optimizer: sgd with a momentum (docs/methods.md)"
        )

    def _take_step(self, contributions: Sequence[Contribution], state: TopKEFState) -> tuple[Tensor, ServerMemory]:
        """Return the server's step ``(P,)`` along the mean of the deltas, and its memory after it."""
        mean, server = weighted_sum(contributions, weigh_by_examples), self.config.server
        if server.is_average:
            return mean, state.memory
        # Entries that no site sent have a delta of 0, and their moments decay.
        direction, memory = find_direction(mean.double(), Mask.full(self.layout.size), state.memory, server)
        parameters = slice(self.layout.num_parameters)
        mean[parameters] = (server.lr * direction).float()[parameters]
        return mean, memory

    def _count(self, fraction: float) -> int:
        """Return the number of parameters that a share of all entries selects."""
        return min(floor_fraction(fraction, self.layout.size), self.layout.num_parameters)

    def _split(self, delta: Tensor, kept: Tensor | None, decay: float, fraction: float) -> tuple[Mask, Tensor]:
        """Add what was kept, times ``decay``, to a delta ``(P,)``, in place.

        Returns:
            The entries to send, and what is kept ``(P,)``.
        """
        parameters = slice(self.layout.num_parameters)
        if kept is not None:
            delta[parameters] += decay * kept[parameters].to(delta.device)
        size = self.layout.num_parameters
        largest = find_top_k(delta[parameters].abs(), self._count(fraction))
        # Send the buffers that training has changed: statistics of inputs stay as they are.
        mask = Mask.from_positions(torch.cat([largest, delta[size:].nonzero()[:, 0] + size]), self.layout.size)
        return mask, delta.index_fill(0, mask.find_indices(delta.device), 0.0)
