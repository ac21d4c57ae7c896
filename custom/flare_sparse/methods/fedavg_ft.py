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
from .method import Method, ModelState, broadcast
from .support.averaging import ServerStepConfig, take_server_step

FINETUNE = "finetune"


class Config(ServerStepConfig):
    finetune_epochs: int = Field(1, ge=1, description="epochs of local fine-tuning after the last round")


@final
class FedAvgFT(Method[Config, ModelState]):
    """Rounds as in FedAvg; at the end every site reports the metrics of its fine-tuned model, which stays local."""

    name = "fedavg_ft"
    Config = Config
    final_kinds = frozenset({FINETUNE})
    personal_model = "fine-tuned at the site"

    def init(self, weights: Tensor, sites: Sequence[str]) -> ModelState:
        return ModelState(1, weights)

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != FINETUNE:
            return super().answer(request, site)
        training = self.config.training.model_copy(update={"epochs": self.config.finetune_epochs})
        personal = site.train(site.weights, request.trainable, training, request.round)
        return Update(Patch.empty(self.layout.size), "metrics", site.num_examples, site.evaluate(personal))

    def learn(self, state: ModelState, contributions: Sequence[Contribution]) -> ModelState:
        weights = take_server_step(contributions, state.weights, self.config, self.layout.trainable_size)
        return ModelState(state.round + 1, weights)

    def model(self, state: ModelState) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)

    def ask_final(self, state: ModelState, sites: Sequence[str]) -> dict[str, Assignment]:
        model = self.model(state)
        return broadcast(sites, Assignment(Request(FINETUNE, self.config.rounds + 1, model, model.mask)))
