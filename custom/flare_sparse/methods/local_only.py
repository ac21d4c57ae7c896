"""Local-only training: what a site reaches alone, with the rounds, epochs and seeds of the federated methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..exchange import Assignment, Contribution, Patch, Request, Update
from ..training import Site
from .method import Method, broadcast


@dataclass(frozen=True)
class State:
    weights: Tensor


class LocalOnly(Method[State]):
    """The lower bound: one question, ``rounds`` rounds of training at the site, metrics back, no weights."""

    name = "local_only"

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(weights)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        return None

    def answer(self, request: Request, site: Site) -> Update:
        weights = site.weights
        for t in range(1, self.config.rounds + 1):
            weights = site.train(weights, request.trainable, self.config.training, t)
        return Update(Patch.empty(self.layout.size), "metrics", site.num_examples, site.evaluate(weights))

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        return state

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        model = self.model(state)
        return broadcast(sites, Assignment(Request("train_alone", self.config.rounds, model, model.mask)))
