"""3D AlexNet of NeuroSFL (section 4.2; ``AlexNet3D_Dropout`` of its reference code), for grey-matter maps."""

from __future__ import annotations

from math import prod

from torch import nn

from .blocks import convolution
from .fields import Count, Share, Volume
from .shapes import feature_map, windows


def alexnet3d(*, volume: Volume = (121, 145, 121), outputs: Count = 1, dropout: Share = 0.5) -> nn.Sequential:
    """64C-128C-192C-192C-128C with batch normalisation, then 64 hidden units.

    For (121, 145, 121) it has 2,570,241 parameters, 2,568,064 of them convolution and linear weights, and the last
    map is 1x2x1. A smaller or larger volume changes the first linear layer only.

    Args:
        volume: (depth, height, width) in voxels.
        outputs: logits per volume.
        dropout: before both linear layers.

    Raises:
        ConfigError: the volume is too small.
    """
    last = feature_map("alexnet3d", volume, _last)
    return nn.Sequential(
        nn.Sequential(_convolution(1, 64, kernel=5, stride=2, padding=0), nn.MaxPool3d(3)),
        nn.Sequential(_convolution(64, 128, padding=0), nn.MaxPool3d(3)),
        _convolution(128, 192),
        _convolution(192, 192),
        nn.Sequential(_convolution(192, 128), nn.MaxPool3d(3)),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(128 * prod(last), 64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, outputs),
    )


def _convolution(before: int, after: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> nn.Sequential:
    return convolution(
        3,
        before,
        after,
        strides=stride,
        kernel_size=kernel,
        padding=padding,
        adn_ordering="NA",
        norm="BATCH",
        act="RELU",
    )


def _last(size: int) -> int:
    """The size after the last pooling: 121 -> 59 -> 19 -> 17 -> 5 -> 1."""
    pooled = windows(windows(size, kernel=5, stride=2), kernel=3, stride=3)
    again = windows(windows(pooled, kernel=3), kernel=3, stride=3)
    return windows(again, kernel=3, stride=3)
