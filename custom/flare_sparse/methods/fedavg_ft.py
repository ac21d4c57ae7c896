"""FedAvg-FT (Cheng et al. 2021; NeuroSFL's dense baseline): FedAvg, then every site fine-tunes for itself.

"Fine-tuning is Fine in Federated Learning", arXiv 2108.07313; docs/algorithms.md, section 7.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from pydantic import Field
from torch import Tensor

from ..exchange import Assignment, Contribution, Patch, Request, Update
from ..training import Site
from .method import Method, broadcast
from .support.averaging import AveragedState, FedAvgConfig, finalize_average, learn_average

FINETUNE = "finetune"


class Config(FedAvgConfig):
    finetune_epochs: int = Field(1, ge=1, description="epochs of local fine-tuning after the last round")


@final
class FedAvgFT(Method[Config, AveragedState]):
    """Rounds as in FedAvg; at the end every site reports the metrics of its fine-tuned model, which stays local."""

    name = "fedavg_ft"
    Config = Config
    final_kinds = frozenset({FINETUNE})
    personal_model = "fine-tuned at the site"

    def init(self, weights: Tensor, sites: Sequence[str]) -> AveragedState:
        return AveragedState(1, weights)

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != FINETUNE:
            return super().answer(request, site)
        training = self.config.get_training(request.round).model_copy(update={"epochs": self.config.finetune_epochs})
        personal = site.train(site.weights, request.trainable, training, request.round)
        return Update(Patch.empty(self.layout.size), "metrics", site.num_examples, site.evaluate(personal))

    def learn(self, state: AveragedState, contributions: Sequence[Contribution]) -> AveragedState:
        return learn_average(state, contributions, self.config, self.layout)

    def finalize(self, state: AveragedState) -> AveragedState:
        return finalize_average(state)

    def model(self, state: AveragedState) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)

    def ask_final(self, state: AveragedState, sites: Sequence[str]) -> dict[str, Assignment]:
        model = self.model(state)
        return broadcast(sites, Assignment(Request(FINETUNE, self.config.rounds + 1, model, model.mask)))
