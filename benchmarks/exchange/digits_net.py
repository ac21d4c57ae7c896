"""The network and the data of the benchmark of FLARE's recipes."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Sequential):
    """A perceptron for images of 8 x 8 pixels, 86,026 parameters and 1,024 running statistics."""

    def __init__(self) -> None:
        # FLARE builds the network from its class wherever the initial model is made: equal bits in all cells.
        torch.manual_seed(1)
        super().__init__(
            nn.Linear(64, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )


def load_images(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of ``site-1``, ``site-2`` or ``test``.

    A fifth is for testing. Of the others, a site has 80 % of five digits and 20 % of the other five.
    """
    digits = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits.target))
    is_test = np.arange(len(order)) % 5 == 0
    at_first = rng.random(len(order)) < np.where(digits.target[order] < 5, 0.8, 0.2)
    chosen = {"test": is_test, "site-1": ~is_test & at_first, "site-2": ~is_test & ~at_first}[part]
    rows = order[chosen]
    return torch.tensor(digits.data[rows] / 16, dtype=torch.float32), torch.tensor(digits.target[rows])
