"""Small networks for tables and images."""

from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from ...core.params import LinearPath
from ...inputs.scaling import QuantileEncoder
from .shapes import (
    Bins,
    Channels,
    Count,
    Features,
    Gain,
    Image,
    Share,
    Units,
    build_convolution_block,
    build_fully_connected,
    compute_feature_map_shape,
)

ENCODED = 64
"""Most inputs of a table of which the numbers are encoded."""


def mlp(*, features: Features, outputs: Count = 1, hidden: Units = (64, 32), dropout: Share = 0.0) -> nn.Sequential:
    """Build fully connected layers with ReLU.

    Args:
        features: numbers per example.
        outputs: number of predictions per example.
        hidden: units of each hidden layer; without hidden layers the network is a linear model.
        dropout: dropout rate after each hidden layer.
    """
    return build_fully_connected(features, outputs, hidden, dropout)


class Residual(nn.Module):
    """Adds the output of some layers to their input."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + layers(x)``."""
        total: Tensor = x + self.layers(x)
        return total


class PathAndHidden(nn.Module):
    """The sum of a linear path and of hidden layers."""

    def __init__(self, path: LinearPath, hidden: nn.Module):
        super().__init__()
        self.path, self.hidden = path, hidden

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both outputs ``(B, outputs)``."""
        total: Tensor = self.path(x) + self.hidden(x)
        return total


def resnet_mlp(
    *,
    features: Features,
    outputs: Count = 1,
    numbers: tuple[bool, ...] | None = None,
    width: Count = 64,
    blocks: Count = 1,
    dropout: Share = 0.2,
    bins: Bins = 8,
    gain: Gain = 0.1,
) -> PathAndHidden:
    """Build a residual network with a linear path beside it, for tables of 200 to 5,000 subjects.

    Numbers enter the hidden layers as positions within bins (:class:`QuantileEncoder`), if the table has at most
    ``ENCODED`` inputs: more would give the first layer more weights than such a table can set. The first layer's
    columns of the labels of a category are its embedding.

    Args:
        features: inputs per example, standardised.
        outputs: number of predictions per example.
        numbers: which inputs are numbers; None: all.
        width: units of every hidden layer.
        blocks: residual blocks of two layers.
        dropout: dropout rate in each block and before the output.
        bins: bins of a number; 1: numbers enter as they are.
        gain: factor of the initial weights of the output layer, so that training starts near the linear model. At 0 no
            score could tell hidden weights apart.
    """
    is_number = tuple(numbers) if numbers is not None else (True,) * features
    encoder = QuantileEncoder(is_number, bins) if bins > 1 and any(is_number) and features <= ENCODED else None
    layers = [
        Residual(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width))
        for _ in range(blocks)
    ]
    last = nn.Linear(width, outputs)
    with torch.no_grad():
        last.weight.mul_(gain)
        last.bias.zero_()
    first = nn.Linear(encoder.outputs if encoder else features, width)
    before = [] if encoder is None else [encoder]
    hidden = nn.Sequential(*before, first, *layers, nn.ReLU(), nn.Dropout(dropout), last)
    return PathAndHidden(LinearPath(features, outputs), hidden)


def image_cnn(*, image: Image = (1, 28, 28), outputs: Count = 10, channels: Channels = (32, 64)) -> nn.Sequential:
    """Build blocks of 3x3 convolution, ReLU and max-pooling, then one linear layer.

    Args:
        image: (channels, height, width).
        outputs: number of logits per image.
        channels: output channels of the convolutions; each block halves the image.

    Raises:
        ConfigError: the image is too small.
    """
    height, width = compute_feature_map_shape("image_cnn", image[1:], lambda size: size // 2 ** len(channels))
    blocks = [
        nn.Sequential(_build_convolution_block(inputs, filters), nn.MaxPool2d(2))
        for inputs, filters in zip((image[0], *channels), channels, strict=False)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels[-1] * height * width, outputs))


def image_mlp(*, image: Image = (1, 28, 28), outputs: Count = 10, hidden: Units = (100,)) -> nn.Sequential:
    """Build fully connected layers on the pixels, such as MetaGater's 784-100-10 (Lin et al. 2021, section 5.1).

    Args:
        image: (channels, height, width).
        outputs: number of logits per image.
        hidden: units of each hidden layer.
    """
    return nn.Sequential(nn.Flatten(), mlp(features=prod(image), outputs=outputs, hidden=hidden))


def image_cnn6(
    *, image: Image = (3, 32, 32), outputs: Count = 10, channels: tuple[Count, Count, Count] = (32, 64, 128)
) -> nn.Sequential:
    """Build MetaGater's six-convolution network (Lin et al. 2021, appendix E).

    Three pairs of 3x3 convolutions with ReLU, max-pooling after the first two pairs, average-pooling after the third,
    then one linear layer. Layers "4" and "5" are the fifth and the sixth convolution, which the paper gates. The
    paper's figure does not show the widths; the defaults are this package's choice.

    Args:
        image: (channels, height, width).
        outputs: number of logits per image.
        channels: output channels of each pair.

    Raises:
        ConfigError: the image is too small.
    """
    height, width = compute_feature_map_shape("image_cnn6", image[1:], lambda size: size // 8)
    widths = (image[0], *(channel for channel in channels for _ in range(2)))
    pools = (nn.MaxPool2d(2), nn.MaxPool2d(2), nn.AvgPool2d(2))
    blocks = [
        nn.Sequential(_build_convolution_block(inputs, filters), *([pools[number // 2]] if number % 2 else []))
        for number, (inputs, filters) in enumerate(pairwise(widths))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels[-1] * height * width, outputs))


def _build_convolution_block(inputs: int, outputs: int) -> nn.Sequential:
    """Build a 3x3 convolution that keeps the image's size, and ReLU."""
    return build_convolution_block(nn.Conv2d(inputs, outputs, 3, padding=1))
