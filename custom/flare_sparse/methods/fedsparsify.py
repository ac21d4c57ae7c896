"""FedSparsify (Stripelis et al. 2022), Algorithm 1: the server prunes by magnitude, on a schedule, for good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pydantic import Field, model_validator
from torch import Tensor

from ..aggregation.robust import aggregate
from ..exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask, floor_fraction, prune_mask
from ..training import Site
from .method import AveragingConfig, MaskPreset, Method, broadcast, sample_sites
from .support.schedules import polynomial


class Config(AveragingConfig):
    sparsity: float = Field(0.9, ge=0, lt=1, description="S_T: share of pruned entries after the last round")
    initial_sparsity: float = Field(0.0, ge=0, lt=1, description="S_0: share of pruned entries in round first_round")
    first_round: int = Field(1, ge=1, description="t_0: the schedule starts in this round")
    prune_every: int = Field(1, ge=1, description="F: rounds between prunings")
    exponent: float = Field(3.0, gt=0, description="n in Eq. 1; 1 is linear")
    force_final: bool = Field(False, description="reach S_T in the last round even if prune_every does not divide it")
    prunable: MaskPreset = Field("all_but_norm", description="which parameters may be pruned")

    @model_validator(mode="after")
    def _rises(self) -> Config:
        if self.initial_sparsity > self.sparsity:
            raise ValueError(f"initial_sparsity {self.initial_sparsity} is above sparsity {self.sparsity}")
        return self

    def sparsity_after(self, t: int) -> float:
        """s_t, Eq. 1: share of pruned entries after round ``t``."""
        if self.force_final and t >= self.rounds:
            return self.sparsity
        return polynomial(
            t,
            start=self.initial_sparsity,
            end=self.sparsity,
            first=self.first_round,
            last=self.rounds,
            exponent=self.exponent,
            every=self.prune_every,
        )


@dataclass(frozen=True)
class State:
    round: int
    weights: Tensor
    mask: Mask


class FedSparsify(Method[State]):
    """One global magnitude ranking over all prunable tensors; sites train under the mask."""

    name = "fedsparsify"
    Config = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights, self.full_mask)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        asked = sample_sites(sites, self.config.participation, self.seed, state.round)
        return broadcast(
            asked, Assignment(Request("train", state.round, self.model(state), state.mask), UpdateSpec(mask=state.mask))
        )

    def answer(self, request: Request, site: Site) -> Update:  # w <- w - eta * (g (.) m)
        weights = site.train(site.weights, request.trainable, self.config.training, request.round)
        return Update(Patch.from_vector(weights, request.trainable), "weights", site.num_examples)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:  # average, then purge to s_t
        weights = aggregate(updates, state.weights, self.config.aggregation)
        mask = prune_mask(state.mask, weights.abs(), self.config.sparsity_after(state.round), self._prunable)
        return State(state.round + 1, weights * mask.bits, mask)

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, state.mask)

    @cached_property
    def _prunable(self) -> Mask:
        return Mask.from_preset(self.layout, self.config.prunable)

    def count_paper_scalars(self, sites: int) -> int:
        """``L * sum_t (N_{t-1} + N_t)``, the rule that gives the paper's Table 1 to the digit (ALGORITHMS 1.3).

        It books an upload at the size after the purge, which the site cannot know yet; the ledger counts honestly.
        """
        total, pool = self.layout.size, self._prunable.count
        live = [total] + [
            total - floor_fraction(self.config.sparsity_after(t), pool) for t in range(1, self.config.rounds + 1)
        ]
        return sites * sum(before + after for before, after in pairwise(live))


def centralised_one_shot(
    site: Site, weights: Tensor, sparsity: float, *, config: Config, dense: int = 90, finetune: int = 10
) -> State:
    """The paper's centralised baseline: train, prune once by the same global ranking, fine-tune under the mask.

    Args:
        site: holds all the data.
        weights: ``(P,)`` to begin with.
        sparsity: share of pruned entries.
        config: training and prunable set; a round of it is one pass of ``config.training.epochs`` epochs.
        dense: rounds before the pruning (paper: 90 epochs).
        finetune: rounds after it (paper: 10).
    """
    everything = Mask.full(site.layout.size)
    for t in range(1, dense + 1):
        weights = site.train(weights, everything, config.training, t)
    mask = prune_mask(everything, weights.abs(), sparsity, Mask.from_preset(site.layout, config.prunable))
    weights = weights * mask.bits
    for t in range(dense + 1, dense + finetune + 1):
        weights = site.train(weights, mask, config.training, t)
    return State(dense + finetune + 1, weights, mask)
