"""Fully connected network on the voxels of a coarse volume, the federated kin of a ridge regression on the voxels.

With 100 to 1,000 volumes, linear models and kernel methods on voxels predict age about as well as 3D-CNNs do: Cole et
al. 2017, "Predicting brain age with deep learning from raw imaging data", and Schulz et al. 2020, "Different scaling of
linear models and deep learning in UKBiobank brain images versus machine-learning datasets".
"""

from math import prod

from torch import Tensor, nn

from ...inputs.scaling import InputScaler
from .fields import Count, Share, Units, Volume
from .small import mlp


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
