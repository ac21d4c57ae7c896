"""Training on the pooled data of all sites, the upper bound that federated methods are compared with."""

from __future__ import annotations

from torch import Tensor

from ...core.mask import Mask
from ...core.seeds import limit_threads
from ...training import Site, TrainingConfig


def train_pooled(site: Site, weights: Tensor, config: TrainingConfig, rounds: int) -> Tensor:
    """Train at one site that holds all data, for as many rounds and epochs as a federated run.

    Args:
        site: site with the pooled data.
        weights: initial weights ``(P,)``.
        config: training settings of a round.
        rounds: number of rounds.

    Returns:
        Trained weights ``(P,)``.
    """
    trainable = Mask.full(site.layout.size)
    with limit_threads(1):
        for t in range(1, rounds + 1):
            weights = site.train(weights, trainable, config, t)
    return weights
