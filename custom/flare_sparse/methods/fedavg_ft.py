"""FedAvg-FT (Cheng et al. 2021; NeuroSFL's dense baseline): FedAvg, then every site fine-tunes for itself."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from ..exchange import Assignment, Contribution, Patch, Request, Update
from ..params import Layout
from ..training import Site
from . import fedavg
from .fedavg import FedAvg, State
from .method import Method, broadcast


class FineTuning(fedavg.Config):
    finetune_epochs: int = Field(1, ge=1, description="epochs of local fine-tuning after the last round")


class FedAvgFT(Method[State]):
    """Rounds as in FedAvg; the last question is answered with the metrics of the personal models, which stay home."""

    name = "fedavg_ft"
    Config = FineTuning

    def __init__(self, config: FineTuning, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self._fedavg = FedAvg(config, layout, seed)

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return self._fedavg.init(weights, sites)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        return self._fedavg.ask(state, sites)

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != "finetune":
            return self._fedavg.answer(request, site)
        longer = self.config.training.model_copy(update={"epochs": self.config.finetune_epochs})
        personal = site.train(site.weights, request.trainable, longer, request.round)
        return Update(Patch.empty(self.layout.size), "metrics", site.num_examples, site.evaluate(personal))

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        return self._fedavg.learn(state, updates)

    def model(self, state: State) -> Patch:
        return self._fedavg.model(state)

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        model = self.model(state)
        return broadcast(sites, Assignment(Request("finetune", self.config.rounds + 1, model, model.mask)))
