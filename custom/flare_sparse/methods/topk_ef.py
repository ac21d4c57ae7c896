"""Top-k with error feedback (Stich et al. 2018): each site uploads its largest changes and remembers the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from ..aggregation.weighted import weigh_by_examples, weighted_sum
from ..exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask, floor_fraction, top_k
from ..training import Site
from .method import Method, MethodConfig, broadcast, sample_sites


class Config(MethodConfig):
    fraction: float = Field(0.1, gt=0, le=1, description="share of all entries that a site uploads in a round")


@dataclass(frozen=True)
class State:
    """``changed``: the entries that the last commit moved; all others are as the sites hold them."""

    round: int
    weights: Tensor
    changed: Mask


class TopKEF(Method[State]):
    """Down travels only what changed; up travel the top ``fraction`` of change plus residual (Algorithm 1, Mem-SGD)."""

    name = "topk_ef"
    Config = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights, self.full_mask)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        changed = Patch.from_vector(state.weights, state.changed, over="previous" if state.round > 1 else "zeros")
        everything = self.model(state)
        request = Assignment(
            Request("train", state.round, changed, everything.mask),
            UpdateSpec("delta", min_entries=lambda _: self._uploaded),
            full_model=everything,
        )
        return broadcast(sample_sites(sites, self.config.participation, self.seed, state.round), request)

    @property
    def _uploaded(self) -> int:
        """Entries of an answer."""
        return floor_fraction(self.config.fraction, self.layout.size)

    def answer(self, request: Request, site: Site) -> Update:
        trained = site.train(site.weights, request.trainable, self.config.training, request.round)
        change = trained - site.weights
        if "residual" in site.memory:
            change += site.memory["residual"]
        chosen = top_k(change.abs(), self._uploaded)
        site.memory["residual"] = change * ~chosen.bits
        return Update(Patch.from_vector(change, chosen), "delta", site.num_examples)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        changed = updates[0].patch.mask
        for update in updates[1:]:
            changed = changed | update.patch.mask
        return State(state.round + 1, state.weights + weighted_sum(updates, weigh_by_examples), changed)

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)
