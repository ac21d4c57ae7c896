"""Small networks for tables and images."""

from __future__ import annotations

from monai.networks.blocks import Convolution
from monai.networks.nets import FullyConnectedNet
from torch import nn

from .settings import Channels, Count, Features, Image, Share, Units
from .shapes import feature_map


def mlp(*, features: Features, outputs: Count = 1, hidden: Units = (64, 32), dropout: Share = 0.0) -> FullyConnectedNet:
    """Fully connected layers with ReLU.

    Args:
        features: numbers in a row.
        outputs: numbers predicted per row.
        hidden: units of each hidden layer; none at all makes it a linear model.
        dropout: after each hidden layer.
    """
    return FullyConnectedNet(features, outputs, list(hidden), dropout=dropout or None, act="RELU")


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
        nn.Sequential(
            Convolution(2, before, after, kernel_size=3, adn_ordering="A", norm=None, act="RELU"), nn.MaxPool2d(2)
        )
        for before, after in zip((image[0], *channels), channels, strict=False)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels[-1] * height * width, outputs))
