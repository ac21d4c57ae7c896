"""FedAvg-FT (Cheng et al. 2021; NeuroSFL's dense baseline): FedAvg, then every site fine-tunes for itself.

"Fine-tuning is Fine in Federated Learning", arXiv 2108.07313; docs/algorithms.md, section 7.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

from pydantic import Field
from torch import Tensor

from ..core.exchange import Contribution, Patch
from ..core.mask import Mask
from .support.averaging import AveragedState, AveragingMethod, FedAvgConfig, learn_average
from .support.finetuning import FineTuning
from .traffic.averaging import FedAvgTraffic
from .traffic.base import Traffic


class Config(FedAvgConfig):
    finetune: FineTuning = Field(
        default_factory=FineTuning, description="training at each site after the last round, whose model stays there"
    )


@final
class FedAvgFT(AveragingMethod[Config, AveragedState]):
    """Rounds as in FedAvg; at the end every site reports the metrics of its fine-tuned model, which stays local."""

    name = "fedavg_ft"
    Config = Config

    @cached_property
    def traffic(self) -> Traffic:
        return FedAvgTraffic(self)

    def init(self, weights: Tensor, sites: Sequence[str]) -> AveragedState:
        return AveragedState(1, weights)

    def learn(self, state: AveragedState, contributions: Sequence[Contribution]) -> AveragedState:
        return learn_average(state, contributions, self.config, self.layout)

    def model(self, state: AveragedState) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))
