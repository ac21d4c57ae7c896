"""Blocks of convolutions and linear layers, compared with MONAI's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from monai.networks.blocks import Convolution
from monai.networks.nets import FullyConnectedNet
from torch import nn

from flare_sparse.tasks.models.shapes import build_convolution_block, build_fully_connected


def seed(build: Callable[..., nn.Module], *sizes: Any, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    return build(*sizes, **settings).train()


CONVOLUTIONS = [
    (
        lambda: build_convolution_block(nn.Conv2d(2, 4, 3, padding=1)),
        2,
        {"adn_ordering": "A", "norm": None, "act": "RELU"},
    ),
    (
        lambda: build_convolution_block(nn.Conv2d(2, 4, 3, 2, padding=1, bias=False), nn.BatchNorm2d(4)),
        2,
        {"strides": 2, "bias": False, "adn_ordering": "NA", "norm": "BATCH", "act": "RELU"},
    ),
    (
        lambda: build_convolution_block(nn.Conv3d(2, 4, 5), nn.BatchNorm3d(4)),
        3,
        {"kernel_size": 5, "padding": 0, "adn_ordering": "NA", "norm": "BATCH", "act": "RELU"},
    ),
    (
        lambda: build_convolution_block(nn.Conv3d(2, 4, 1), nn.InstanceNorm3d(4, affine=True), activate=False),
        3,
        {"kernel_size": 1, "adn_ordering": "N", "norm": ("INSTANCE", {"affine": True}), "act": None},
    ),
]


@pytest.mark.parametrize(("ours", "dimensions", "monai"), CONVOLUTIONS)
def test_convolution_has_the_names_weights_and_outputs_of_monai(
    ours: Callable[[], nn.Module], dimensions: int, monai: dict[str, Any]
) -> None:
    pair = seed(ours), seed(Convolution, dimensions, 2, 4, **monai)
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
