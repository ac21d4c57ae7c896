"""Residual networks for small images (He et al. 2016, "Deep Residual Learning", section 4.2): 6n + 2 layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .blocks import convolution
from .fields import Count, Image


class Shortcut(nn.Module):
    """Option A of the paper: every second pixel, new channels zero; it has no parameters."""

    def __init__(self, stride: int, new_channels: int):
        super().__init__()
        self.stride, self.new_channels = stride, new_channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C + new, H / stride, W / stride)."""
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class Block(nn.Module):
    """Two 3x3 convolutions with batch normalisation beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = _convolution(before, after, stride, "NA")
        self.second = _convolution(after, after, 1, "N")
        self.shortcut = Shortcut(stride, after - before)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) to (B, after, H / stride, W / stride)."""
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def resnet(depth: int, *, image: Image = (3, 32, 32), outputs: Count = 10) -> nn.Sequential:
    """Three stages of 16, 32 and 64 channels with (depth - 2) / 6 blocks each, a global mean and a linear layer.

    Args:
        depth: number of weighted layers, 6n + 2.
        image: (channels, height, width); the network takes any height and width.
        outputs: logits per image.
    """
    stages: list[nn.Module] = []
    for before, after in ((16, 16), (16, 32), (32, 64)):
        stages.append(Block(before, after, stride=1 if before == after else 2))
        stages.extend(Block(after, after, stride=1) for _ in range((depth - 2) // 6 - 1))
    return nn.Sequential(
        _convolution(image[0], 16, 1, "NA"), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, outputs)
    )


def _convolution(before: int, after: int, stride: int, order: str) -> nn.Sequential:
    return convolution(
        2, before, after, strides=stride, kernel_size=3, adn_ordering=order, norm="BATCH", act="RELU", bias=False
    )


resnet32, resnet44, resnet56, resnet110 = (partial(resnet, depth) for depth in (32, 44, 56, 110))
