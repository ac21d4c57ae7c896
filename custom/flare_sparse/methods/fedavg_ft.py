"""FedAvg-FT (Cheng et al. 2021; NeuroSFL's dense baseline): FedAvg, then every site fine-tunes for itself.

"Fine-tuning is Fine in Federated Learning", arXiv 2108.07313; docs/algorithms.md, section 7.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from pydantic import Field
from torch import Tensor

from ..exchange import Assignment, Contribution, Patch, Request, Update
from ..training import Site, TrainingConfig
from .method import Method, broadcast
from .support.averaging import AveragedState, FedAvgConfig, finalize_average, learn_average

FINETUNE = "finetune"


class Config(FedAvgConfig):
    finetune_epochs: int = Field(1, ge=1, description="epochs of local fine-tuning after the last round")
    finetune_lr: float | None = Field(
        None, gt=0, description="learning rate of fine-tuning; null: that of the last round"
    )
    finetune_proximal: float | None = Field(
        None,
        ge=0,
        description="pull of fine-tuning towards the global model (Ditto's lambda); null: training.proximal",
    )

    @property
    def privacy_blocker(self) -> str | None:
        return "fine-tuning trains once more, and the metrics of its model leave"

    @property
    def finetuning(self) -> TrainingConfig:
        """How a site trains after the last round."""
        t = self.rounds + 1
        training = self.get_training(t)
        changes: dict[str, float] = {"epochs": self.finetune_epochs}
        if self.finetune_lr is not None:
            # Not decayed again: compute_learning_rate multiplies by this power.
            changes["lr"] = self.finetune_lr / training.lr_decay ** (t - 1)
        if self.finetune_proximal is not None:
            changes["proximal"] = self.finetune_proximal
        return training.model_copy(update=changes)


@final
class FedAvgFT(Method[Config, AveragedState]):
    """Rounds as in FedAvg; at the end every site reports the metrics of its fine-tuned model, which stays local."""

    name = "fedavg_ft"
    Config = Config
    final_kinds = frozenset({FINETUNE})
    personal_model = "fine-tuned at the site"

    def init(self, weights: Tensor, sites: Sequence[str]) -> AveragedState:
        return AveragedState(1, weights)

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        return self.layout.size, self.layout.size

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != FINETUNE:
            return super().answer(request, site)
        personal = site.train(site.weights, request.trainable, self.config.finetuning, request.round)
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
