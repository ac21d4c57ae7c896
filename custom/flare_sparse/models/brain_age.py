"""3D-CNNs for brain age from T1-weighted volumes.

Stripelis et al. 2022, "Federated Progressive Sparsification" (FedSparsify), section 4 and its published
``brainage3d_cnn.py``: the full-size network; and a version for 3 mm and 6 mm volumes that learns on two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from .blocks import convolution
from .fields import Channels, Count, Volume
from .shapes import feature_map

PAPER_CHANNELS = (32, 64, 128, 256, 256)


def brain_age_cnn(*, volume: Volume = (91, 109, 91), outputs: Count = 1) -> nn.Sequential:
    """FedSparsify's 3D-CNN: 2,950,401 parameters whatever the size of the volume.

    Five blocks of 3x3x3 convolution, instance normalisation, max-pooling and ReLU; a 1x1x1 block of 64 channels;
    the mean over the remaining map; a 1x1x1 convolution. The paper's count includes 1,600 moving statistics that its
    normalisation never uses; here 1,600 affine parameters take their place. Kernels start Glorot-uniform. Targets are
    expected to be standardised, so the paper's bias of 62.68 years at the output is 0.

    Args:
        volume: (depth, height, width) in voxels; the paper's is 91x109x91 at 2 mm.
        outputs: numbers predicted per volume.

    Raises:
        ConfigError: the volume is too small.
    """
    feature_map("brain_age_cnn", volume, lambda size: size // 2 ** len(PAPER_CHANNELS), at_least=2)
    network = nn.Sequential(
        *_blocks(PAPER_CHANNELS, pooled=len(PAPER_CHANNELS)),
        _pointwise(PAPER_CHANNELS[-1], 64),
        nn.AdaptiveAvgPool3d(1),
        nn.Conv3d(64, outputs, kernel_size=1),
        nn.Flatten(),
    )
    for part in network.modules():
        if isinstance(part, nn.Conv3d):
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return network


def brain_age_cnn_3mm(
    *,
    volume: Volume = (26, 32, 26),
    outputs: Count = 1,
    channels: Channels = (16, 32, 64, 64, 64),
    reduced: Count = 32,
    pooled: Count = 3,
) -> nn.Sequential:
    """A smaller 3D-CNN for 3 mm (52x64x52) and 6 mm (26x32x26) volumes; also a classifier with one logit.

    Instead of a mean over the last map, whose mean the normalisation before it would have removed, the map is
    flattened into a linear layer. At 26x32x26 it has 293,936 convolution and linear weights.

    Args:
        volume: (depth, height, width) in voxels.
        outputs: numbers predicted per volume.
        channels: of the 3x3x3 convolutions.
        reduced: channels that the 1x1x1 convolution leaves for the linear layer.
        pooled: number of blocks, from the first, that halve the volume.

    Raises:
        ConfigError: the volume is too small.
    """
    halvings = min(pooled, len(channels))
    last = feature_map("brain_age_cnn_3mm", volume, lambda size: size // 2**halvings, at_least=2)
    return nn.Sequential(
        *_blocks(channels, pooled=halvings),
        _pointwise(channels[-1], reduced),
        nn.Flatten(),
        nn.Linear(reduced * prod(last), outputs),
    )


def _blocks(channels: Sequence[int], pooled: int) -> list[nn.Module]:
    """Convolution, instance normalisation, max-pooling in the first ``pooled`` blocks, ReLU."""
    return [
        nn.Sequential(
            _normalised(before, after, kernel=3),
            *([nn.MaxPool3d(2)] if number < pooled else []),
            nn.ReLU(),
        )
        for number, (before, after) in enumerate(zip((1, *channels), channels, strict=False))
    ]


def _pointwise(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(_normalised(before, after, kernel=1), nn.ReLU())


def _normalised(before: int, after: int, kernel: int) -> nn.Sequential:
    norm = ("INSTANCE", {"affine": True})
    return convolution(3, before, after, kernel_size=kernel, adn_ordering="N", norm=norm, act=None)
