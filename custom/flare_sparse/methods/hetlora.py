"""HetLoRA (Cho et al. 2024): sites of different ranks; factors are zero-padded, averaged by size, then truncated.

"Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", arXiv 2401.06432; docs/algorithms.md,
section 4.10. A site gives up its last ranks where they shrink. The server sees all factors of every site. The penalty
that pushes a site's last ranks down is left out: the comparison of Koo et al. 2025 gives gamma = 0.99 and no strength
of the penalty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from pydantic import Field
from torch import Tensor

from ..core.exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..core.mask import Mask, floor_fraction
from ..training import Site
from .aggregation.weighted import normalize_capped, weigh_by_examples, weighted_sum
from .method import ModelState
from .support.lora import RankedConfig, RankedMethod
from .support.masks import unite_masks


class HetLoRAConfig(RankedConfig):
    decay: float = Field(0.99, gt=0, le=1)
    """gamma: a site gives up its ranks beyond floor(gamma * r_k)"""


@dataclass(frozen=True)
class HetLoRAState(ModelState):
    """The model and the current ranks.

    Attributes:
        owners: names of the sites that have contributed.
        ranks: the rank of each of them after its last update.
    """

    owners: tuple[str, ...]
    ranks: tuple[int, ...]


@final
class HetLoRA(RankedMethod[HetLoRAConfig, HetLoRAState]):
    """A site of rank r_k receives and trains the first r_k slots of every module, and returns them or fewer."""

    name = "hetlora"
    Config = HetLoRAConfig

    def init(self, weights: Tensor, sites: Sequence[str]) -> HetLoRAState:
        return HetLoRAState(1, weights, (), ())

    def build_assignments(self, kind: str, state: HetLoRAState, sites: Sequence[str]) -> dict[str, Assignment]:
        """Return the truncated model for each site, one object for each rank."""
        current = dict(zip(state.owners, state.ranks, strict=True))
        ranks = {name: min(self.get_initial_rank(name), current.get(name, self.slots.rank)) for name in sites}
        return self.assign_ranks(kind, state, ranks)

    def expect(self, rank: int) -> UpdateSpec:
        """Return that a site returns all of its slots or those of the decayed rank."""
        masks = self.select_first_ranks(rank), self.select_first_ranks(self.decay_rank(rank))
        return UpdateSpec(accepts=lambda _, mask: mask in masks, min_entries=lambda _: masks[1].count)

    def get_initial_rank(self, site: str) -> int:
        return min(self.config.get_rank(site), self.slots.rank)

    def decay_rank(self, rank: int) -> int:
        """Return the rank that remains where a site gives up its last ones."""
        return max(floor_fraction(self.config.decay, rank), 1)

    def answer(self, request: Request, site: Site) -> Update:
        start, mask = site.weights, self.require_affordable(request, site)
        trained = site.train(start, mask, self.config.get_training(request.round), request.round).cpu()
        smaller = self.select_first_ranks(self.decay_rank(self._count_ranks(mask)))
        tail = mask - smaller
        has_shrunk = self._compute_size(trained, tail) < self._compute_size(start, tail)
        patch = Patch.from_vector(trained, smaller if has_shrunk else mask)
        return Update(patch, self.update_content, site.num_examples)

    def _count_ranks(self, mask: Mask) -> int:
        """Return r_k of a truncated model: the number of slots of each module in its mask."""
        slots = self.slots.find_slots(mask & self.slots.factors["A"], "A")
        return 0 if slots is None else int(slots.sum()) // self.slots.num_modules

    def _compute_size(self, vector: Tensor, mask: Mask) -> float:
        """Return ``||B|| * ||A||`` of the slots in ``mask``, over all modules."""
        a, b = (mask.bits & self.slots.factors["A"].bits, mask.bits & self.slots.factors["B"].bits)
        return float(torch.linalg.vector_norm(vector[a]) * torch.linalg.vector_norm(vector[b]))

    def learn(self, state: HetLoRAState, contributions: Sequence[Contribution]) -> HetLoRAState:
        """Return the state with the mean of the zero-padded factors; a slot that no site returned keeps its values.

        Where all sites have given a slot up, its ``B`` is zero.
        """
        # Ordered as weighted_sum orders them, so that each weight meets its own site.
        ordered = sorted(contributions, key=lambda contribution: contribution.site)
        weights = self._weigh_by_size(ordered)
        owned = unite_masks(c.patch.mask for c, weight in zip(ordered, weights, strict=True) if weight > 0)
        ranks = dict(zip(state.owners, state.ranks, strict=True))
        previous_ranks = [min(self.get_initial_rank(c.site), ranks.get(c.site, self.slots.rank)) for c in ordered]
        ranks |= {contribution.site: self._count_ranks(contribution.patch.mask) for contribution in ordered}
        given_up = self.select_first_ranks(max(previous_ranks)) - self.select_first_ranks(max(ranks.values()))
        # A slot whose A and B are both zero has no gradient: averaged over no owner, it would never train again.
        vector = torch.where(owned.bits, weighted_sum(ordered, lambda _: weights), state.weights)
        # A slot that its last owner has given up must not stay in the result. B alone is zero, as at the start: a site
        # of higher rank that contributes later for the first time can train the slot.
        vector[(given_up & self.slots.factors["B"]).bits] = 0.0
        return HetLoRAState(state.round + 1, vector, tuple(sorted(ranks)), tuple(ranks[name] for name in sorted(ranks)))

    def _weigh_by_size(self, contributions: Sequence[Contribution]) -> list[float]:
        """Return ``||B_k A_k||_F`` over their sum; the weights by examples while all products are zero."""
        sizes = [self._compute_product_norm(contribution.patch.to_vector()) for contribution in contributions]
        return (
            normalize_capped(sizes, contributions[0].max_share) if sum(sizes) > 0 else weigh_by_examples(contributions)
        )

    def _compute_product_norm(self, vector: Tensor) -> float:
        """Return the Frobenius norm of ``B A`` over all modules.

        ``||B A||^2 = sum((B^T B) * (A A^T))``, so no product is formed.
        """
        total = 0.0
        for adapter in self.slots.adapters:
            a, b = adapter.view_matrix(vector, "A").double(), adapter.view_matrix(vector, "B").double()
            total += float(((b.T @ b) * (a @ a.T)).sum())
        return math.sqrt(max(total, 0.0))
