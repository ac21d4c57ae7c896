"""Top-k with error feedback (Stich et al. 2018), Algorithm 1 (Mem-SGD): large entries are sent, the rest is kept.

"Sparsified SGD with Memory", arXiv 1809.07599; docs/algorithms.md, section 7.4.

Buffers are exchanged whole. Memory is for gradients, whose sum over rounds is a long step in the right direction. A
running statistic moves to the site's own value in every round, so that the sum of its deltas leads past that value, and
a variance below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from pydantic import Field
from torch import Tensor

from ..compute.structure.norms import clip_variances
from ..core.exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..core.mask import Mask, floor_fraction, top_k
from ..core.needs import Need, Needs
from ..training import Site
from .aggregation.weighted import weigh_by_examples, weighted_sum
from .method import Method, MethodConfig
from .support.masks import unite_masks
from .traffic.base import Traffic
from .traffic.others import LargestEntriesTraffic


class Config(MethodConfig):
    fraction: float = Field(
        0.1,
        gt=0,
        le=1,
        description="share of all entries that a site uploads in a round, running statistics not included",
    )

    def needs(self) -> Needs:
        return frozenset({Need.OWN_ENTRIES.because("each site sends its largest changes"), Need.MORE_READS.because()})


@dataclass(frozen=True)
class State:
    """The model and the entries of its last change.

    Attributes:
        round: the next round, 1-based.
        weights: float32 ``(P,)``.
        changed: the entries that the last round changed; sites that took part in it hold all others.
    """

    round: int
    weights: Tensor
    changed: Mask


@final
class TopKEF(Method[Config, State]):
    """Sites receive the changed entries and return the largest ``fraction`` of delta plus residual, and all buffers."""

    name = "topk_ef"
    Config = Config
    update_content = "delta"

    @cached_property
    def traffic(self) -> Traffic:
        return LargestEntriesTraffic(self)

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights, Mask.full(self.layout.size))

    def build_assignment(self, kind: str, state: State) -> Assignment:
        changed = Patch.from_vector(state.weights, state.changed, "previous" if state.round > 1 else "zeros")
        model = self.model(state)
        return Assignment(
            Request(kind, state.round, changed, model.mask),
            UpdateSpec(self.update_content, min_entries=lambda _: self.upload_size),
            full_model=model,
        )

    @property
    def upload_size(self) -> int:
        """Number of parameters in an update."""
        return min(floor_fraction(self.config.fraction, self.layout.size), self.layout.trainable_size)

    def answer(self, request: Request, site: Site) -> Update:
        training = self.config.get_training(request.round)
        trained = site.train(site.weights, request.trainable, training, request.round)
        delta = trained - site.weights
        parameters = slice(self.layout.trainable_size)
        if "residual" in site.memory:
            delta[parameters] += site.memory["residual"][parameters]
        # Of the buffers those that training has changed: statistics of inputs stay as they are.
        bits = delta != 0
        bits[parameters] = top_k(delta[parameters].abs(), self.upload_size).bits
        mask = Mask(bits)
        site.memory["residual"] = delta * ~mask.bits
        return Update(Patch.from_vector(delta, mask), self.update_content, site.num_examples)

    def learn(self, state: State, contributions: Sequence[Contribution]) -> State:
        weights = state.weights + weighted_sum(contributions, weigh_by_examples)
        # A mean of variances, unless a short number format has rounded the deltas, or a site makes them up.
        weights = clip_variances(weights, Mask.full(self.layout.size), self.layout)
        return State(state.round + 1, weights, unite_masks(contribution.patch.mask for contribution in contributions))

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))
