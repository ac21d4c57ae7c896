"""Nodes of a channel graph: the values of a forward pass, by the operation that computes them.

Batch normalisation: layers in which examples change each other's gradient, and the variances that they keep.
"""

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ...core.mask import Mask
from ...core.params import Layout


@dataclass(frozen=True)
class Value:
    """One feature map or vector of hidden units in a forward pass.

    Attributes:
        node: name in the traced graph.
        inputs: indices of the values that it is computed from.
        channels: number of channels; 0 for the network's input, whose channels are not distinguished
            (docs/algorithms.md, section 3.4).
    """

    node: str
    inputs: tuple[int, ...]
    channels: int


@dataclass(frozen=True)
class InputNode(Value):
    """The network's input."""


@dataclass(frozen=True)
class Passthrough(Value):
    """A value whose channel ``i`` depends on its input's channel ``i`` alone: pooling, activation, dropout, flattening.

    Attributes:
        rectified: whether it is the output of a ReLU.
    """

    rectified: bool = False


@dataclass(frozen=True)
class NormNode(Passthrough):
    """A normalisation.

    Attributes:
        module: path of the module; it may have a weight, a bias and running statistics, each with one number per
            channel.
        by_channel: whether it normalises every channel by itself (batch and instance normalisation do, group and
            layer normalisation do not).
    """

    module: str = ""
    by_channel: bool = True


@dataclass(frozen=True)
class Weighted(Value):
    """A linear layer or convolution: output channel ``j`` depends on the input channels of its group.

    Attributes:
        module: path of the module; its weight has shape ``(channels, ...)``.
        groups: number of groups of a convolution.
    """

    module: str = ""
    groups: int = 1


@dataclass(frozen=True)
class Sum(Value):
    """Channel-wise sum of several values: a residual connection."""


@dataclass(frozen=True)
class Concat(Value):
    """Concatenation of several values along the channels."""


@dataclass(frozen=True)
class Pad(Value):
    """A value padded with zero channels.

    Attributes:
        before: number of zero channels before the value's own.
    """

    before: int = 0


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
