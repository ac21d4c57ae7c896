"""FedAvg + one step (Lin et al. 2021), section 5.2: FedAvg's model gets one gradient step at each target site.

A baseline of "MetaGater: Fast Learning of Conditional Channel Gated Networks via Federated Meta-Learning", arXiv
2011.12511; docs/algorithms.md, section 6.10.
"""

from collections.abc import Sequence
from typing import Literal, final

from pydantic import Field
from torch import Tensor

from ..core.exchange import Contribution, Patch, Request, Update
from ..core.mask import Mask
from ..core.needs import Need, Needs
from ..training import Site
from .aggregation.weighted import Weights, weigh_by_examples, weigh_equally, weighted_sum
from .method import TRAIN, ModelState, train_locally
from .support.adaptation import AdaptationConfig, AdaptationMethod


class FedAvgOneStepConfig(AdaptationConfig):
    weighting: Literal["examples", "uniform"] = Field("examples", description="weight of a site in the average")

    def needs(self) -> Needs:
        if self.weighting == "examples":
            return super().needs()
        reason = f"weighting: {self.weighting} is not the mean by examples"
        return super().needs() | {Need.EQUAL_WEIGHTS.because(reason, "set weighting to examples")}


@final
class FedAvgOneStep(AdaptationMethod[FedAvgOneStepConfig, ModelState]):
    """Rounds as in FedAvg, of a few steps each; at the end every target takes one step and reports its metrics."""

    name = "fedavg_one_step"
    Config = FedAvgOneStepConfig
    trains_all_entries = True

    def init(self, weights: Tensor, sites: Sequence[str]) -> ModelState:
        return ModelState(1, weights)

    def train(self, request: Request, site: Site) -> Update:
        return train_locally(request, site, self.config.get_training(request.round), steps=self.config.local_steps)

    def learn(self, state: ModelState, contributions: Sequence[Contribution]) -> ModelState:
        return ModelState(state.round + 1, weighted_sum(contributions, self.get_sum_weights(TRAIN)))

    def get_sum_weights(self, kind: str) -> Weights:
        return weigh_by_examples if self.config.weighting == "examples" else weigh_equally

    def model(self, state: ModelState) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))
