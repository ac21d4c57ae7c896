"""3D-CNNs for brain age from T1-weighted volumes.

The full-size network of Stripelis et al. 2022, "Federated Progressive Sparsification" (FedSparsify), section 4 and the
published ``brainage3d_cnn.py``; and a smaller one for 3 mm and 6 mm volumes, small enough to train on two CPU cores.

3D AlexNet of NeuroSFL (section 4.2; ``AlexNet3D_Dropout`` of its reference code), for grey-matter maps.

Fully connected network on the voxels of a coarse volume, the federated kin of a ridge regression on the voxels.

With 100 to 1,000 volumes, linear models and kernel methods on voxels predict age about as well as 3D-CNNs do: Cole et
al. 2017, "Predicting brain age with deep learning from raw imaging data", and Schulz et al. 2020, "Different scaling of
linear models and deep learning in UKBiobank brain images versus machine-learning datasets".
"""

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from ...inputs.scaling import InputScaler
from .shapes import (
    Channels,
    Count,
    Share,
    Units,
    Volume,
    build_convolution_block,
    compute_feature_map_shape,
    count_windows,
)
from .small import mlp

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


class HemisphereMean(nn.Module):
    """Average each volume with its mirror image, and keep one half with the middle plane."""

    def forward(self, volumes: Tensor) -> Tensor:
        """Return ``(B, channels, ceil(D / 2), H, W)`` for volumes ``(B, channels, D, H, W)``, D from left to right."""
        mean = (volumes + volumes.flip(2)) / 2
        return mean[:, :, : (volumes.shape[2] + 1) // 2]


def voxel_mlp(
    *,
    volume: Volume = (17, 21, 17),
    outputs: Count = 1,
    hidden: Units = (64,),
    dropout: Share = 0.0,
    symmetric: bool = True,
    standardize: bool = True,
) -> nn.Sequential:
    """Build fully connected layers with ReLU on voxels, which are standardised by statistics of all sites by default.

    The statistics of each voxel (:class:`InputScaler`) are exchanged once, before round 1, and stay in the model. A row
    of the first layer's weights is a map of the brain. At 17x21x17, the 3 mm volumes at 9 mm, the defaults have 205,696
    linear weights and 16,065 statistics.

    Args:
        volume: (depth, height, width) in voxels, in RAS orientation.
        outputs: number of predictions per volume.
        hidden: units of each hidden layer; without hidden layers the network is a linear model.
        dropout: dropout rate after each hidden layer.
        symmetric: whether both hemispheres share their weights, which halves the network.
        standardize: whether voxels are standardised; False: they pass as the task normalises them, and no statistics
            are exchanged, as jobs need that hide the updates of a site.
    """
    depth, *rest = volume
    features = ((depth + 1) // 2 if symmetric else depth) * prod(rest)
    return nn.Sequential(
        *([HemisphereMean()] if symmetric else []),
        nn.Flatten(),
        *([InputScaler([True] * features)] if standardize else []),
        mlp(features=features, outputs=outputs, hidden=hidden, dropout=dropout),
    )
