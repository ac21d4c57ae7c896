"""Blocks of convolutions and linear layers, compared with MONAI's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from monai.networks.blocks import Convolution
from monai.networks.nets import FullyConnectedNet
from torch import nn

from flare_sparse.tasks.models.blocks import build_convolution, build_fully_connected


def seed(build: Callable[..., nn.Module], *sizes: Any, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    return build(*sizes, **settings).train()


CONVOLUTIONS = [
    (2, {}, {"adn_ordering": "A", "norm": None, "act": "RELU"}),
    (
        2,
        {"stride": 2, "bias": False, "norm": nn.BatchNorm2d},
        {"strides": 2, "bias": False, "adn_ordering": "NA", "norm": "BATCH", "act": "RELU"},
    ),
    (
        3,
        {"kernel": 5, "padding": 0, "norm": nn.BatchNorm3d},
        {"kernel_size": 5, "padding": 0, "adn_ordering": "NA", "norm": "BATCH", "act": "RELU"},
    ),
    (
        3,
        {"kernel": 1, "norm": partial(nn.InstanceNorm3d, affine=True), "activate": False},
        {"kernel_size": 1, "adn_ordering": "N", "norm": ("INSTANCE", {"affine": True}), "act": None},
    ),
]


@pytest.mark.parametrize(("dimensions", "ours", "monai"), CONVOLUTIONS)
def test_convolution_has_the_names_weights_and_outputs_of_monai(
    dimensions: int, ours: dict[str, Any], monai: dict[str, Any]
) -> None:
    pair = seed(build_convolution, dimensions, 2, 4, **ours), seed(Convolution, dimensions, 2, 4, **monai)
    assert_equal(*pair, torch.rand(3, 2, *[7] * dimensions))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("hidden", [(), (5, 3)])
def test_linear_layers_have_the_names_weights_and_outputs_of_monai(hidden: tuple[int, ...], dropout: float) -> None:
    ours = seed(build_fully_connected, 6, 2, hidden, dropout)
    assert_equal(ours, seed(FullyConnectedNet, 6, 2, hidden, dropout=dropout or None, act="RELU"), torch.rand(4, 2, 3))


def assert_equal(one: nn.Module, other: nn.Module, inputs: torch.Tensor) -> None:
    outputs = []
    for network in (one, other):
        torch.manual_seed(4)
        outputs.append(network(inputs))
    assert torch.equal(*outputs)
    assert list(one.state_dict()) == list(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
