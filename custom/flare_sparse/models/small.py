"""Small networks for tables and images."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from torch import nn

from .blocks import convolution, fully_connected
from .fields import Channels, Count, Features, Image, Share, Units
from .shapes import feature_map


def mlp(*, features: Features, outputs: Count = 1, hidden: Units = (64, 32), dropout: Share = 0.0) -> nn.Sequential:
    """Fully connected layers with ReLU.

    Args:
        features: numbers in a row.
        outputs: numbers predicted per row.
        hidden: units of each hidden layer; none at all makes it a linear model.
        dropout: after each hidden layer.
    """
    return fully_connected(features, outputs, list(hidden), dropout=dropout or None, act="RELU")


def image_cnn(*, image: Image = (1, 28, 28), outputs: Count = 10, channels: Channels = (32, 64)) -> nn.Sequential:
    """Blocks of 3x3 convolution, ReLU and max-pooling, then one linear layer.

    Args:
        image: (channels, height, width).
        outputs: logits per image.
        channels: of the convolutions; each halves the image.

    Raises:
        ConfigError: the image is too small.
    """
    height, width = feature_map("image_cnn", image[1:], lambda size: size // 2 ** len(channels))
    blocks = [
        nn.Sequential(_convolution(before, after), nn.MaxPool2d(2))
        for before, after in zip((image[0], *channels), channels, strict=False)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels[-1] * height * width, outputs))


def image_mlp(*, image: Image = (1, 28, 28), outputs: Count = 10, hidden: Units = (100,)) -> nn.Sequential:
    """Fully connected layers on the pixels; MetaGater's MNIST network is 784-100-10 (Lin et al. 2021, section 5.1).

    Args:
        image: (channels, height, width).
        outputs: logits per image.
        hidden: units of each hidden layer.
    """
    return nn.Sequential(nn.Flatten(), mlp(features=prod(image), outputs=outputs, hidden=hidden))


def image_cnn6(
    *, image: Image = (3, 32, 32), outputs: Count = 10, channels: tuple[Count, Count, Count] = (32, 64, 128)
) -> nn.Sequential:
    """MetaGater's six-convolution network (Lin et al. 2021, appendix E): pairs of 3x3 convolutions with ReLU, max-pooling
    after the first two pairs, average-pooling after the third, one linear layer. The widths are ours: its figure is lost.

    Layers "4" and "5" are the fifth and the sixth convolution, which the paper gates.

    Args:
        image: (channels, height, width).
        outputs: logits per image.
        channels: of each pair.

    Raises:
        ConfigError: the image is too small.
    """
    height, width = feature_map("image_cnn6", image[1:], lambda size: size // 8)
    widths = (image[0], *(channel for channel in channels for _ in range(2)))
    pools = (nn.MaxPool2d(2), nn.MaxPool2d(2), nn.AvgPool2d(2))
    blocks = [
        nn.Sequential(_convolution(before, after), *([pools[number // 2]] if number % 2 else []))
        for number, (before, after) in enumerate(pairwise(widths))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels[-1] * height * width, outputs))


def _convolution(before: int, after: int) -> nn.Sequential:
    """A 3x3 convolution that keeps the size, and ReLU."""
    return convolution(2, before, after, kernel_size=3, adn_ordering="A", norm=None, act="RELU")
