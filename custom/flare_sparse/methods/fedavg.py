"""FedAvg (McMahan et al. 2017), Algorithm 1: the dense baseline.

"Communication-Efficient Learning of Deep Networks from Decentralized Data", arXiv 1602.05629; docs/algorithms.md,
section 7.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.exchange import Contribution, Patch
from ..core.mask import Mask
from .support.averaging import AveragedState, AveragingMethod, FedAvgConfig, learn_average
from .traffic.averaging import FedAvgTraffic


class FedAvg(AveragingMethod[FedAvgConfig, AveragedState]):
    """Every site trains the whole model; the server averages the models, weighted by examples."""

    name = "fedavg"
    Config = FedAvgConfig
    traffic_class = FedAvgTraffic

    def init(self, weights: Tensor, sites: Sequence[str]) -> AveragedState:
        return AveragedState(1, weights)

    def learn(self, state: AveragedState, contributions: Sequence[Contribution]) -> AveragedState:
        return learn_average(state, contributions, self.config, self.layout)

    def model(self, state: AveragedState) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))
