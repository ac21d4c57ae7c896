"""FedAvg (McMahan et al. 2017), Algorithm 1: the dense baseline.

"Communication-Efficient Learning of Deep Networks from Decentralized Data", arXiv 1602.05629; docs/algorithms.md,
section 7.1.

FedAvg-FT (Cheng et al. 2021; NeuroSFL's dense baseline): FedAvg, then every site fine-tunes for itself.

"Fine-tuning is Fine in Federated Learning", arXiv 2108.07313; docs/algorithms.md, section 7.2.

Local-only training: the lower bound, in which every site trains alone.

Rounds, epochs and random orders are those of the federated methods (docs/algorithms.md, section 7.3).
"""

from collections.abc import Sequence
from typing import final

from pydantic import Field
from torch import Tensor

from ..core.exchange import Assignment, Contribution, Patch, Request, Update
from ..core.needs import Need, Needs
from ..training import Site
from .method import Method, MethodConfig, ModelState, broadcast
from .support.averaging import AveragedState, AveragingConfig, AveragingMethod, FineTuning


@final
class FedAvg(AveragingMethod[AveragingConfig, AveragedState]):
    """Every site trains the whole model; the server averages the models, weighted by examples."""

    name = "fedavg"
    Config = AveragingConfig
    trains_all_entries = True


class FedAvgFTConfig(AveragingConfig):
    finetune: FineTuning = Field(default_factory=FineTuning)
    """training at each site after the last round, whose model stays there"""


@final
class FedAvgFT(AveragingMethod[FedAvgFTConfig, AveragedState]):
    """Rounds as in FedAvg; at the end every site reports the metrics of its fine-tuned model, which stays local."""

    name = "fedavg_ft"
    Config = FedAvgFTConfig
    trains_all_entries = True


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

    def ask_final(self, state: ModelState, sites: Sequence[str]) -> dict[str, Assignment]:
        model = self.model(state)
        return broadcast(sites, Assignment(Request(TRAIN_ALONE, self.config.rounds, model, model.mask)))
