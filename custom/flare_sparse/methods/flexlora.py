"""FlexLoRA (Bai et al. 2024): the server averages the products ``B_k A_k`` and decomposes the average by SVD.

"Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources", arXiv 2402.11505. Each
site gets the best approximation of the rank that it can afford. Every site's factors leave it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ..aggregation.weighted import weigh_by_examples, weighted_sum
from ..exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask
from ..training import Site
from .method import sample_sites
from .support.lora import RankedConfig, RankedMethod


class Config(RankedConfig):
    split: Literal["balanced", "left"] = Field(
        "balanced", description="where the singular values go: sqrt(S) into both factors, or all of S into B"
    )


@dataclass(frozen=True)
class State:
    """``weights``: after the first round, slot ``i`` of a module is its ``i``-th singular direction."""

    round: int
    weights: Tensor


class FlexLoRA(RankedMethod[State]):
    """A site of rank r_k holds, trains and sends the first r_k slots of every module."""

    name = "flexlora"
    Config = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        return self._requests("train", state, sample_sites(sites, self.config.participation, self.seed, state.round))

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        """Every site judges the model of its own rank."""
        return self._requests(EVALUATE, state, sites)

    def _requests(self, kind: str, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        """One question for each rank that is asked."""
        ranks = {site: self.config.rank_of(site) for site in sites}
        masks = {rank: self.held(rank) for rank in set(ranks.values())}
        asked = {
            rank: Assignment(Request(kind, state.round, Patch.from_vector(state.weights, on), on), UpdateSpec(mask=on))
            for rank, on in masks.items()
        }
        return {site: asked[rank] for site, rank in ranks.items()}

    def answer(self, request: Request, site: Site) -> Update:
        on = self.check_affordable(request, site)
        trained = site.train(site.weights, on, self.config.training, request.round)
        return Update(Patch.from_vector(trained, on), "weights", site.num_examples)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        weights = weighted_sum(updates, weigh_by_examples)  # of the rest; the factors are written below
        shares, vectors = weigh_by_examples(updates), [update.patch.to_vector() for update in updates]
        for adapter in self.slots.adapters:
            left = torch.cat([w * adapter.matrix(v, "B").double() for w, v in zip(shares, vectors, strict=True)], dim=1)
            right = torch.cat([adapter.matrix(v, "A").double() for v in vectors])
            b, a = factorise(left, right, adapter.rank, balanced=self.config.split == "balanced")
            adapter.matrix(weights, "B").copy_(b)
            adapter.matrix(weights, "A").copy_(a)
        return State(state.round + 1, weights)

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))


def factorise(left: Tensor, right: Tensor, rank: int, *, balanced: bool = True) -> tuple[Tensor, Tensor]:
    """The best approximation of ``left @ right`` of a rank, as factors; the product is never formed.

    With ``left = Q R`` and ``right.T = P T`` the singular values are those of the small ``R T.T``.

    Args:
        left: ``(d1, n)``.
        right: ``(n, d2)``.
        rank: of the result; directions beyond those that there are stay zero.
        balanced: sqrt(S) in both factors; otherwise all of S in the left one.

    Returns:
        ``(d1, rank)`` and ``(rank, d2)``, strongest direction first.
    """
    q, r = torch.linalg.qr(left)
    p, t = torch.linalg.qr(right.T)
    u, s, v = torch.linalg.svd(r @ t.T, full_matrices=False)
    kept = min(rank, s.numel())
    into_left, into_right = (s.sqrt(), s.sqrt()) if balanced else (s, torch.ones_like(s))
    b, a = left.new_zeros(left.shape[0], rank), right.new_zeros(rank, right.shape[1])
    b[:, :kept] = (q @ u * into_left)[:, :kept]
    a[:kept] = ((p @ v.T) * into_right).T[:kept]
    return b, a
