"""FedAvg (McMahan et al. 2017), Algorithm 1: the dense baseline.

"Communication-Efficient Learning of Deep Networks from Decentralized Data", arXiv 1602.05629; docs/algorithms.md,
section 7.1.
"""

from typing import final

from .support.averaging import FedAvgConfig, FedAvgRounds


@final
class FedAvg(FedAvgRounds):
    """Every site trains the whole model; the server averages the models, weighted by examples."""

    name = "fedavg"
    Config = FedAvgConfig
