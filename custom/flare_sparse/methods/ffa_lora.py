"""FFA-LoRA (Sun et al. 2024): A stays as it was drawn, only B trains and is averaged.

"Improving LoRA in Privacy-preserving Federated Learning", arXiv 2403.12313. The average of the products is then the
product of the averages. Every site's B leaves it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..aggregation.weighted import weigh_by_examples, weighted_sum
from ..exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask
from ..params import Layout
from ..training import Site
from .method import broadcast, sample_sites
from .support.lora import LoRAConfig, LoRAMethod


@dataclass(frozen=True)
class State:
    round: int
    weights: Tensor


class FFALoRA(LoRAMethod[State]):
    """FedAvg of B (and of what is neither factor); A travels once."""

    name = "ffa_lora"
    Config = LoRAConfig

    def __init__(self, config: LoRAConfig, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self._travelling: Mask = ~self.slots.factors["A"]

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        asked = sample_sites(sites, self.config.participation, self.seed, state.round)
        return broadcast(asked, self._request("train", state))

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        return broadcast(sites, self._request(EVALUATE, state))

    def _request(self, kind: str, state: State) -> Assignment:
        everything = self.model(state)
        changed = Patch.from_vector(state.weights, self._travelling, over="previous") if state.round > 1 else everything
        return Assignment(
            Request(kind, state.round, changed, self._travelling),
            UpdateSpec("delta", mask=self._travelling),
            full_model=everything,
        )

    def answer(self, request: Request, site: Site) -> Update:
        trained = site.train(site.weights, request.trainable, self.config.training, request.round)
        return Update(Patch.from_vector(trained - site.weights, request.trainable), "delta", site.num_examples)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        moved = self._travelling.take(state.weights + weighted_sum(updates, weigh_by_examples))
        return State(state.round + 1, self._travelling.put(moved, state.weights.clone()))

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)
