"""Batch normalisation: layers in which examples change each other's gradient, and the variances that they keep."""

from typing import TypeGuard

import torch
from torch import Tensor, nn

from ...core.mask import Mask
from ...core.params import Layout


def mixes_examples(module: nn.Module) -> TypeGuard[nn.modules.batchnorm._NormBase]:
    """Return whether a layer normalises by the minibatch, or keeps statistics of the data."""
    norms = nn.modules.batchnorm
    return isinstance(module, norms._BatchNorm) or (isinstance(module, norms._NormBase) and module.track_running_stats)


def replace_batch_norms(network: nn.Module) -> int:
    """Replace the layers that mix examples by group normalisation (Wu and He 2018, arXiv 1803.08494), in place.

    The names and shapes of the weights and biases stay; running statistics go.

    Returns:
        Number of replaced layers.
    """
    count = 0
    for parent in list(network.modules()):
        for name, part in list(parent.named_children()):
            if mixes_examples(part):
                channels = part.num_features
                norm = nn.GroupNorm(choose_groups(channels), channels, eps=part.eps, affine=part.affine)
                setattr(parent, name, norm)
                count += 1
    return count


def choose_groups(channels: int) -> int:
    """Return the largest number of groups, at most 32, that divides a number of channels into groups of two or more.

    A group of one channel would have no variance where the map is a single voxel.

    >>> choose_groups(64), choose_groups(48), choose_groups(16), choose_groups(7)
    (32, 24, 8, 1)
    """
    return next(groups for groups in range(max(min(32, channels // 2), 1), 0, -1) if channels % groups == 0)


def clip_variances(values: Tensor, mask: Mask, layout: Layout) -> Tensor:
    """Return values with running variances of at least 0; ``values`` themselves if none is below.

    Args:
        values: ``(mask.count,)`` values of a model, in the order of the layout.
        mask: entries of the values.
        layout: layout of the model.
    """
    clipped = values
    for spec, start in zip(layout.tensors, layout.offsets, strict=False):
        if spec.role != "buffer" or spec.name.rpartition(".")[2] != "running_var":
            continue
        bounds = torch.tensor([start, start + spec.size])
        first, end = bounds.tolist() if mask.is_full else torch.searchsorted(mask.indices, bounds).tolist()
        if bool((clipped[first:end] < 0).any()):
            # The values may be those of a message: one buffer for all sites, which another attempt may read again.
            clipped = clipped.clone() if clipped is values else clipped
            clipped[first:end].clamp_(min=0)
    return clipped
