"""Local-only training: the lower bound, in which every site trains alone.

Rounds, epochs and random orders are those of the federated methods (docs/algorithms.md, section 7.3).
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from ..core.exchange import Assignment, Contribution, Patch, Request, Update
from ..core.mask import Mask
from ..core.needs import Need, Needs
from ..training import Site
from .method import Method, MethodConfig, ModelState, broadcast

TRAIN_ALONE = "train_alone"
"""The kind of the one request: train for all rounds."""


class LocalOnlyConfig(MethodConfig):
    def needs(self) -> Needs:
        alone = "sites train for all rounds in answer to one request"
        return super().needs() | {
            Need.NUMBER_OF_ROUNDS.because(f"{alone}, and the run has no common model to continue from"),
            Need.NO_COMMON_MODEL.because(f"{alone}, and no model is common to them"),
            Need.OWN_MODEL.because("trained at the site alone"),
        }


@final
class LocalOnly(Method[LocalOnlyConfig, ModelState]):
    """One request: each site trains alone for all rounds and returns metrics; no weights travel to the server."""

    name = "local_only"
    Config = LocalOnlyConfig
    round_kinds = frozenset({TRAIN_ALONE})
    trains_all_entries = True

    def init(self, weights: Tensor, sites: Sequence[str]) -> ModelState:
        # No round is exchanged, so training is over for the server before the first request.
        return ModelState(self.config.rounds + 1, weights)

    def answer(self, request: Request, site: Site) -> Update:
        weights = site.weights
        for t in range(1, self.config.rounds + 1):
            weights = site.train(weights, request.trainable, self.config.get_training(t), t)
        return Update(Patch.empty(self.layout.size), "metrics", site.num_examples, site.evaluate(weights))

    def learn(self, state: ModelState, contributions: Sequence[Contribution]) -> ModelState:
        return state

    def model(self, state: ModelState) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))

    def ask_final(self, state: ModelState, sites: Sequence[str]) -> dict[str, Assignment]:
        model = self.model(state)
        return broadcast(sites, Assignment(Request(TRAIN_ALONE, self.config.rounds, model, model.mask)))
