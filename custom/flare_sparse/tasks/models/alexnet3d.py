"""3D AlexNet of NeuroSFL (section 4.2; ``AlexNet3D_Dropout`` of its reference code), for grey-matter maps."""

from math import prod

from torch import nn

from .blocks import build_convolution_block
from .fields import Count, Share, Volume
from .shapes import compute_feature_map_shape, count_windows


def alexnet3d(*, volume: Volume = (121, 145, 121), outputs: Count = 1, dropout: Share = 0.5) -> nn.Sequential:
    """Build 3D AlexNet: 64C-128C-192C-192C-128C with batch normalisation, then 64 hidden units.

    For (121, 145, 121) it has 2,570,241 parameters, of which 2,568,064 are convolution and linear weights, and the
    last feature map is 1x2x1. The volume affects the size of the first linear layer only.

    Args:
        volume: (depth, height, width) in voxels.
        outputs: number of logits per volume.
        dropout: dropout rate before both linear layers.

    Raises:
        ConfigError: the volume is too small.
    """
    last = compute_feature_map_shape("alexnet3d", volume, _compute_last_size)
    return nn.Sequential(
        nn.Sequential(_build_convolution_block(1, 64, kernel=5, stride=2, padding=0), nn.MaxPool3d(3)),
        nn.Sequential(_build_convolution_block(64, 128, padding=0), nn.MaxPool3d(3)),
        _build_convolution_block(128, 192),
        _build_convolution_block(192, 192),
        nn.Sequential(_build_convolution_block(192, 128), nn.MaxPool3d(3)),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(128 * prod(last), 64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, outputs),
    )


def _build_convolution_block(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1
) -> nn.Sequential:
    return build_convolution_block(nn.Conv3d(inputs, outputs, kernel, stride, padding), nn.BatchNorm3d(outputs))


def _compute_last_size(size: int) -> int:
    """Return the size of an axis after the last pooling: 121 -> 59 -> 19 -> 17 -> 5 -> 1."""
    first_pool = count_windows(count_windows(size, kernel=5, stride=2), kernel=3, stride=3)
    second_pool = count_windows(count_windows(first_pool, kernel=3), kernel=3, stride=3)
    return count_windows(second_pool, kernel=3, stride=3)
