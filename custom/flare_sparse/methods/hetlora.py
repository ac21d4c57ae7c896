"""HetLoRA (Cho et al. 2024): sites of different ranks, zero-padded, averaged by size, truncated on the way down.

"Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", arXiv 2401.06432. A site whose last ranks
shrink gives them up. Every site's factors leave it whole.

The penalty that pushes a site's last ranks down is left out: LoRA-A2's comparison gives gamma = 0.99 and no strength.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from ..aggregation.weighted import normalize_capped, weigh_by_examples, weighted_sum
from ..exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask
from ..training import Site
from .method import sample_sites
from .support.lora import RankedConfig, RankedMethod


class Config(RankedConfig):
    decay: float = Field(0.99, gt=0, le=1, description="gamma: a site gives up its ranks beyond floor(gamma * r_k)")
    sparsity_weighted: bool = Field(True, description="weigh a site by ||B_k A_k||; false: by its examples")


@dataclass(frozen=True)
class State:
    """``ranks``: what each of ``owners``, the sites that have answered, has left."""

    round: int
    weights: Tensor
    owners: tuple[str, ...]
    ranks: tuple[int, ...]


class HetLoRA(RankedMethod[State]):
    """A site of rank r_k holds, trains and sends the first r_k slots of every module, perhaps fewer the next time."""

    name = "hetlora"
    Config = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights, (), ())

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        return self._requests("train", state, sample_sites(sites, self.config.participation, self.seed, state.round))

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        """Every site judges the model of its own rank."""
        return self._requests(EVALUATE, state, sites)

    def _requests(self, kind: str, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        """Truncation: the first r_k slots; one question for each rank that is asked."""
        left = dict(zip(state.owners, state.ranks, strict=True))
        ranks = {name: min(self._initial(name), left.get(name, self.slots.rank)) for name in sites}
        asked = {}
        for rank in set(ranks.values()):
            on, fewer = self.held(rank), self.held(self.pruned(rank))
            fits, least = partial(_among, (on, fewer)), partial(_entries, fewer)
            asked[rank] = Assignment(
                Request(kind, state.round, Patch.from_vector(state.weights, on), on),
                UpdateSpec(accepts=fits, min_entries=least),
            )
        return {name: asked[rank] for name, rank in ranks.items()}

    def _initial(self, site: str) -> int:
        rank: int = self.config.rank_of(site)
        return min(rank, self.slots.rank)

    def pruned(self, rank: int) -> int:
        """The rank that is left when a site gives up its last ones."""
        return max(int(self.config.decay * rank), 1)

    def answer(self, request: Request, site: Site) -> Update:
        start, on = site.weights, self.check_affordable(request, site)
        trained = site.train(start, on, self.config.training, request.round)
        fewer = self.held(self.pruned(self._rank(on)))
        tail = on - fewer
        shrunk = self._size(trained, tail) < self._size(start, tail)
        return Update(Patch.from_vector(trained, fewer if shrunk else on), "weights", site.num_examples)

    def _rank(self, on: Mask) -> int:
        """r_k of a truncated model: the slots that a module has of it."""
        found = self.slots.find_slots(on & self.slots.factors["A"], "A")
        return 0 if found is None else int(found.sum()) // self.slots.modules

    def _size(self, vector: Tensor, on: Mask) -> float:
        """``||B|| * ||A||`` of some slots, over all modules."""
        a, b = (on.bits & self.slots.factors["A"].bits, on.bits & self.slots.factors["B"].bits)
        return float(torch.linalg.vector_norm(vector[a]) * torch.linalg.vector_norm(vector[b]))

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        weights = weighted_sum(updates, self._by_size if self.config.sparsity_weighted else weigh_by_examples)
        ranks = dict(zip(state.owners, state.ranks, strict=True))
        ranks |= {update.site: self._rank(update.patch.mask) for update in updates}
        return State(state.round + 1, weights, tuple(sorted(ranks)), tuple(ranks[name] for name in sorted(ranks)))

    def _by_size(self, updates: Sequence[Contribution]) -> list[float]:
        """``||B_k A_k||_F`` over their sum; by examples while all are zero."""
        sizes = [self._product_norm(update.patch.to_vector()) for update in updates]
        return normalize_capped(sizes, updates[0].max_share) if sum(sizes) > 0 else weigh_by_examples(updates)

    def _product_norm(self, vector: Tensor) -> float:
        """Frobenius norm over all modules; ``||B A||^2 = sum((B^T B) * (A A^T))``, so no product is formed."""
        total = 0.0
        for adapter in self.slots.adapters:
            a, b = adapter.matrix(vector, "A").double(), adapter.matrix(vector, "B").double()
            total += float(((b.T @ b) * (a @ a.T)).sum())
        return math.sqrt(max(total, 0.0))

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)


def _entries(fewer: Mask, _site: str) -> int:
    return fewer.count


def _among(allowed: Sequence[Mask], _site: str, on: Mask) -> bool:
    return on in allowed
