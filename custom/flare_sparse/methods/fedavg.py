"""FedAvg (McMahan et al. 2017), Algorithm 1: the dense baseline.

"Communication-Efficient Learning of Deep Networks from Decentralized Data", arXiv 1602.05629; docs/algorithms.md,
section 7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from ..exchange import Contribution, Patch
from .method import Method, ModelState
from .support.averaging import ServerStepConfig, take_server_step


@final
class FedAvg(Method[ServerStepConfig, ModelState]):
    """Every site trains the whole model; the server averages the models, weighted by examples."""

    name = "fedavg"
    Config = ServerStepConfig

    def init(self, weights: Tensor, sites: Sequence[str]) -> ModelState:
        return ModelState(1, weights)

    def learn(self, state: ModelState, contributions: Sequence[Contribution]) -> ModelState:
        weights = take_server_step(contributions, state.weights, self.config, self.layout.trainable_size)
        return ModelState(state.round + 1, weights)

    def model(self, state: ModelState) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)
