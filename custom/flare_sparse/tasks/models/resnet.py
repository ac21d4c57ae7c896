"""Residual networks for small images (He et al. 2016, "Deep Residual Learning", section 4.2): 6n + 2 layers."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .shapes import Count, Image, build_convolution_block


class Shortcut(nn.Module):
    """Shortcut of the paper's option A, without parameters: subsampled pixels, and zeros for additional channels."""

    def __init__(self, stride: int, new_channels: int):
        super().__init__()
        self.stride, self.new_channels = stride, new_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C + new_channels, H / stride, W / stride)."""
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class ResidualBlock(nn.Module):
    """Residual block: two 3x3 convolutions with batch normalisation, added to a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = _build_convolution_block(inputs, outputs, stride)
        self.second = _build_convolution_block(outputs, outputs, activate=False)
        self.shortcut = Shortcut(stride, outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def resnet(depth: int, *, image: Image = (3, 32, 32), outputs: Count = 10) -> nn.Sequential:
    """Build three stages of 16, 32 and 64 channels with (depth - 2) / 6 blocks each, a global mean and a linear layer.

    Args:
        depth: number of weighted layers, 6n + 2.
        image: (channels, height, width); the network accepts any height and width.
        outputs: number of logits per image.
    """
    stages: list[nn.Module] = []
    for inputs, channels in ((16, 16), (16, 32), (32, 64)):
        stages.append(ResidualBlock(inputs, channels, stride=1 if inputs == channels else 2))
        stages.extend(ResidualBlock(channels, channels, stride=1) for _ in range((depth - 2) // 6 - 1))
    return nn.Sequential(
        _build_convolution_block(image[0], 16),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, outputs),
    )


def _build_convolution_block(inputs: int, outputs: int, stride: int = 1, *, activate: bool = True) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return build_convolution_block(convolution, nn.BatchNorm2d(outputs), activate=activate)


resnet32, resnet44, resnet56, resnet110 = (partial(resnet, depth) for depth in (32, 44, 56, 110))
