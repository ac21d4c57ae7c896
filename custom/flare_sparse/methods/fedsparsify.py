"""FedSparsify (Stripelis et al. 2022), Algorithm 1: the server prunes by magnitude, on a schedule, without regrowth.

"Towards Sparsified Federated Neuroimaging Models via Weight Pruning", arXiv 2208.11669; docs/algorithms.md, section 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..core.exchange import Contribution, Patch
from ..core.mask import Mask, floor_fraction, prune_mask
from ..core.needs import Need, Needs
from .method import MaskPreset
from .support.averaging import FINETUNE, AveragedState, AveragingConfig, AveragingMethod
from .support.masks import find_zero_weights


class FedSparsifyConfig(AveragingConfig):
    sparsity: float = Field(0.9, ge=0, lt=1)
    """S_T: share of pruned entries after the last round"""
    initial_sparsity: float = Field(0.0, ge=0, lt=1)
    """S_0: share of pruned entries in round first_round"""
    first_round: int = Field(1, ge=1)
    """t_0: first round of the schedule"""
    prune_every: int = Field(1, ge=1)
    """F: rounds between prunings"""
    exponent: float = Field(3.0, gt=0)
    """n in Eq. 1; 1 is linear"""
    force_final: bool = False
    """reach S_T in the last round even if prune_every does not divide it"""
    prunable: MaskPreset = "all_but_norm"
    """which parameters may be pruned"""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.initial_sparsity > self.sparsity:
            raise ValueError(f"initial_sparsity {self.initial_sparsity} is above sparsity {self.sparsity}")
        return self

    def needs(self) -> Needs:
        # With privacy, the server prunes models that are private already: post-processing, which costs nothing.
        longer = self.model_copy(update={"rounds": self.rounds + 1})
        if all(self.compute_sparsity(t) == longer.compute_sparsity(t) for t in range(1, self.rounds + 1)):
            return super().needs()
        return super().needs() | {
            Need.NUMBER_OF_ROUNDS.because(
                f"the sparsity of every round depends on method.rounds: the schedule has reached {self.sparsity} after "
                f"{self.rounds} rounds"
            )
        }

    def compute_sparsity(self, t: int) -> float:
        """Return s_t, the share of pruned entries after round ``t`` (Eq. 1).

        ``s_t = S_T + (S_0 - S_T) * (1 - (F * floor(t / F) - t_0) / (T - t_0)) ** n``; one-shot pruning for T = t_0.
        """
        first, last, step = self.first_round, self.rounds, self.prune_every * (t // self.prune_every)
        if t >= first >= last or (self.force_final and t >= last):
            return self.sparsity
        if step < first:
            return self.initial_sparsity
        if step >= last:
            return self.sparsity
        remaining = (1 - (step - first) / (last - first)) ** self.exponent
        return self.sparsity + (self.initial_sparsity - self.sparsity) * float(remaining)


@dataclass(frozen=True)
class FedSparsifyState(AveragedState):
    """The model and the mask of its live entries, outside which its weights are zero.

    Attributes:
        mask: live entries.
        zero_start: entries of the prunable weights that are zero in the initial model.
    """

    mask: Mask
    zero_start: Mask


@final
class FedSparsify(AveragingMethod[FedSparsifyConfig, FedSparsifyState]):
    """Sites train the live entries; the server averages them and prunes the smallest of the whole model."""

    name = "fedsparsify"
    Config = FedSparsifyConfig
    prunes_for_good = True

    def init(self, weights: Tensor, sites: Sequence[str]) -> FedSparsifyState:
        zero_start = find_zero_weights(self.layout, weights, self.config.prunable)
        return FedSparsifyState(1, weights, Mask.full(self.layout.size), zero_start)

    def restrict(
        self, state: FedSparsifyState, stepped: FedSparsifyState, contributions: Sequence[Contribution]
    ) -> FedSparsifyState:
        """Return the average of the sites' models, pruned to s_t."""
        mask = self._prune(state, stepped.weights.abs(), self.config.compute_sparsity(state.round))
        return replace(stepped, weights=stepped.weights * mask.bits, mask=mask)

    def _prune(self, state: FedSparsifyState, scores: Tensor, sparsity: float) -> Mask:
        """Return the mask of which ``floor(sparsity * |pool|)`` entries of the pool are off.

        Weights that start at zero are ranked among themselves: however useful, they stay small beside weights that
        start at random values, and one pool would prune all of them (docs/algorithms.md, section 2.7, deviation 8).
        """
        apart = state.zero_start
        if not apart.count:
            return prune_mask(state.mask, scores, sparsity, self._prunable)
        mask = prune_mask(state.mask, scores, sparsity, apart)
        return prune_mask(mask, scores.masked_fill(apart.bits, torch.inf), sparsity, self._prunable)

    def model(self, state: FedSparsifyState) -> Patch:
        return Patch.from_vector(state.weights, state.mask)

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        """Return the number of live entries, twice: the schedule alone decides it.

        Early stopping may end the schedule in any round, so that the model to fine-tune has this number or more.
        """
        sparsity = max((self.config.compute_sparsity(s) for s in range(1, t)), default=0.0)
        live = self.layout.size - floor_fraction(sparsity, self._prunable.count)
        return live, self.layout.size if kind == FINETUNE else live

    def count_paper_scalars(self, sites: int) -> int:
        """Return ``L * sum_t (N_{t-1} + N_t)``, the count that reproduces the paper's Table 1 exactly.

        It counts an upload at its size after the pruning, which the site cannot know yet; the ledger counts what is
        sent (docs/algorithms.md, section 2.7, deviation 6).
        """
        total, pool = self.layout.size, self._prunable.count
        live = [total] + [
            total - floor_fraction(self.config.compute_sparsity(t), pool) for t in range(1, self.config.rounds + 1)
        ]
        return sites * sum(before + after for before, after in pairwise(live))

    @cached_property
    def _prunable(self) -> Mask:
        return Mask.from_preset(self.layout, self.config.prunable)
