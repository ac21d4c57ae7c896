"""Residual networks for small images (He et al. 2016, "Deep Residual Learning", section 4.2): 6n + 2 layers.

And MONAI's for volumes, as which published encoders are pre-trained; newly initialised, they are small.
"""

from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from .shapes import Count, Image, Volume, build_convolution_block, compute_feature_map_shape


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

Depth = Literal[10, 18, 34, 50]
BLOCKS: dict[int, list[int]] = {10: [1, 1, 1, 1], 18: [2, 2, 2, 2], 34: [3, 4, 6, 3], 50: [3, 4, 6, 3]}
"""Residual blocks of the four stages by depth."""


def resnet3d(
    *,
    volume: Volume = (26, 32, 26),
    outputs: Count = 1,
    depth: Depth = 10,
    channels: Annotated[int, Field(ge=4, le=256)] = 16,
    stride: Literal[1, 2] = 1,
) -> nn.Module:
    """Build MONAI's ResNet, the network of MedicalNet (Chen et al. 2019, "Med3D") if ``channels`` is 64.

    The default has 902,545 parameters, MedicalNet's ResNet-10 14,356,033. Shortcuts are those of the published weights:
    of depth 18 and 34 without parameters, and without a gradient in MONAI.

    Args:
        volume: (depth, height, width) of an input in voxels.
        outputs: numbers per volume.
        depth: layers with weights.
        channels: channels of the first stage; each further stage doubles them.
        stride: stride of the first convolution; all others together have 16.

    Raises:
        ConfigError: the volume is so small that a batch normalisation would be of one voxel.
    """
    compute_feature_map_shape("resnet3d", volume, lambda size: -(-size // (16 * stride)), at_least=2)
    from monai.networks.nets.resnet import ResNet, get_medicalnet_pretrained_resnet_args

    has_bias, shortcut = get_medicalnet_pretrained_resnet_args(depth)
    network: nn.Module = ResNet(
        "bottleneck" if depth == 50 else "basic",
        BLOCKS[depth],
        [channels * 2**stage for stage in range(4)],
        n_input_channels=1,
        conv1_t_stride=stride,
        shortcut_type=shortcut,
        bias_downsample=has_bias,
        num_classes=outputs,
    )
    return network
