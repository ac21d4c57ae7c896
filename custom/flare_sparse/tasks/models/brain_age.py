"""3D-CNNs for brain age from T1-weighted volumes.

The full-size network of Stripelis et al. 2022, "Federated Progressive Sparsification" (FedSparsify), section 4 and the
published ``brainage3d_cnn.py``; and a smaller one for 3 mm and 6 mm volumes, small enough to train on two CPU cores.
"""

from collections.abc import Sequence
from math import prod

from torch import nn

from .blocks import build_convolution_block
from .fields import Channels, Count, Volume
from .shapes import compute_feature_map_shape

PAPER_CHANNELS = (32, 64, 128, 256, 256)


def brain_age_cnn(*, volume: Volume = (91, 109, 91), outputs: Count = 1) -> nn.Sequential:
    """Build FedSparsify's 3D-CNN; it has 2,950,401 parameters for every size of the volume.

    Five blocks of 3x3x3 convolution, instance normalisation, max-pooling and ReLU; a 1x1x1 block of 64 channels; the
    mean over the remaining feature map; a 1x1x1 convolution. Kernels are initialised Glorot-uniformly.

    It differs from the paper in two points. The paper's parameter count includes 1,600 moving statistics that its
    normalisation never uses; here there are 1,600 affine parameters instead. Targets are expected to be standardised,
    so the output bias starts at 0 instead of 62.68 years.

    Args:
        volume: (depth, height, width) in voxels; the paper's is 91x109x91 at 2 mm.
        outputs: number of predictions per volume.

    Raises:
        ConfigError: the volume is too small.
    """
    compute_feature_map_shape("brain_age_cnn", volume, lambda size: size // 2 ** len(PAPER_CHANNELS), at_least=2)
    network = nn.Sequential(
        *_build_blocks(PAPER_CHANNELS, pooled=len(PAPER_CHANNELS)),
        _build_pointwise_block(PAPER_CHANNELS[-1], 64),
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
    """Build a smaller 3D-CNN for 3 mm (52x64x52) and 6 mm (26x32x26) volumes, for regression or one logit.

    The last feature map is flattened into a linear layer instead of averaged: instance normalisation fixes the mean of
    each channel, so an average would carry little information. At 26x32x26 the network has 293,936 convolution and
    linear weights.

    Args:
        volume: (depth, height, width) in voxels.
        outputs: number of predictions per volume.
        channels: output channels of the 3x3x3 convolutions.
        reduced: output channels of the 1x1x1 convolution before the linear layer.
        pooled: number of initial blocks that halve the volume.

    Raises:
        ConfigError: the volume is too small.
    """
    halvings = min(pooled, len(channels))
    last = compute_feature_map_shape("brain_age_cnn_3mm", volume, lambda size: size // 2**halvings, at_least=2)
    return nn.Sequential(
        *_build_blocks(channels, pooled=halvings),
        _build_pointwise_block(channels[-1], reduced),
        nn.Flatten(),
        nn.Linear(reduced * prod(last), outputs),
    )


def _build_blocks(channels: Sequence[int], pooled: int) -> list[nn.Module]:
    """Build blocks of convolution, instance normalisation, max-pooling (in the first ``pooled`` blocks) and ReLU."""
    return [
        nn.Sequential(
            _build_normalised_convolution(inputs, outputs, kernel=3),
            *([nn.MaxPool3d(2)] if number < pooled else []),
            nn.ReLU(),
        )
        for number, (inputs, outputs) in enumerate(zip((1, *channels), channels, strict=False))
    ]


def _build_pointwise_block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(_build_normalised_convolution(inputs, outputs, kernel=1), nn.ReLU())


def _build_normalised_convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv3d(inputs, outputs, kernel, padding=kernel // 2)
    return build_convolution_block(convolution, nn.InstanceNorm3d(outputs, affine=True), activate=False)
