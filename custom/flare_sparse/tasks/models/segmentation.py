"""MONAI's networks that return one logit per class and voxel, at sizes that train on a CPU.

The defaults are smaller than MONAI's own; larger ones are a matter of settings.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

from ...core.errors import ConfigError, format_shape
from .shapes import Count, Share, Volume, compute_feature_map_shape

Levels = Annotated[tuple[Count, ...], Field(min_length=3, max_length=8)]
SixLevels = Annotated[tuple[Count, ...], Field(min_length=6, max_length=6)]
MAX_PATCH_VOXELS = 2**27
"""Most voxels of a patch: a job cannot ask a site to allocate more."""


def basic_unet(
    *,
    patch: Volume = (64, 64, 64),
    inputs: Count = 1,
    outputs: Count = 2,
    channels: SixLevels = (8, 8, 16, 32, 64, 8),
    dropout: Share = 0.0,
) -> nn.Module:
    """Build MONAI's BasicUNet: five levels with instance normalisation (Falk et al. 2019, the 3D U-Net).

    The default has 360,435 parameters with three outputs; MONAI's own channels are (32, 32, 64, 128, 256, 32).

    Args:
        patch: (depth, height, width) of an input in voxels, at least 16 per side and 32 of one.
        inputs: channels of an input.
        outputs: logits per voxel.
        channels: channels of the five levels, and of the last one on the way up.
        dropout: dropout rate.

    Raises:
        ConfigError: the patch is too small.
    """
    _check_patch("basic_unet", patch, 4, divisible=False)
    from monai.networks.nets import BasicUNet

    network: nn.Module = BasicUNet(3, inputs, outputs, channels, dropout=dropout)
    return network


def dyn_unet(
    *,
    patch: Volume = (64, 64, 64),
    inputs: Count = 1,
    outputs: Count = 2,
    channels: Levels = (8, 16, 32, 64),
    residual: bool = False,
    dropout: Share = 0.0,
) -> nn.Module:
    """Build MONAI's DynUNet, the network of nnU-Net (Isensee et al. 2021), without deep supervision.

    Each level after the first halves the patch. The default has 350,771 parameters with three outputs.

    Args:
        patch: (depth, height, width) of an input in voxels, a multiple of 2 for every level after the first.
        inputs: channels of an input.
        outputs: logits per voxel.
        channels: channels of each level.
        residual: whether the blocks have residual connections.
        dropout: dropout rate.

    Raises:
        ConfigError: the patch cannot be halved as often.
    """
    levels = len(channels)
    _check_patch("dyn_unet", patch, levels - 1)
    from monai.networks.nets import DynUNet

    network: nn.Module = DynUNet(
        3,
        inputs,
        outputs,
        kernel_size=[3] * levels,
        strides=[1] + [2] * (levels - 1),
        upsample_kernel_size=[2] * (levels - 1),
        filters=channels,
        dropout=dropout or None,
        res_block=residual,
    )
    return network


def seg_resnet(
    *,
    patch: Volume = (64, 64, 64),
    inputs: Count = 1,
    outputs: Count = 2,
    channels: Annotated[int, Field(ge=8, le=512, multiple_of=8)] = 8,
    blocks: Levels = (1, 2, 2, 4),
    dropout: Share = 0.0,
) -> nn.Module:
    """Build MONAI's SegResNet (Myronenko 2018) without its autoencoder; it normalises groups of channels.

    The default has 1,176,195 parameters with three outputs.

    Args:
        patch: (depth, height, width) of an input in voxels, a multiple of 2 for every level after the first.
        inputs: channels of an input.
        outputs: logits per voxel.
        channels: channels of the first level, a multiple of 8; every level doubles them.
        blocks: residual blocks of each level.
        dropout: dropout rate.

    Raises:
        ConfigError: the patch cannot be halved as often.
    """
    _check_patch("seg_resnet", patch, len(blocks) - 1)
    from monai.networks.nets import SegResNet

    network: nn.Module = SegResNet(
        3,
        channels,
        inputs,
        outputs,
        dropout_prob=dropout or None,
        blocks_down=blocks,
        blocks_up=(1,) * (len(blocks) - 1),
    )
    return network


def _check_patch(name: str, patch: Sequence[int], halvings: int, *, divisible: bool = True) -> None:
    """Raise if a network cannot compute patches of this shape.

    Args:
        name: name of the network.
        patch: voxels per axis.
        halvings: how often the network halves each axis.
        divisible: whether each side must be divisible by all halvings; otherwise the network fills it up.

    Raises:
        ConfigError: it cannot.
    """
    if prod(patch) > MAX_PATCH_VOXELS:
        raise ConfigError(
            f"model {name!r}: patch {format_shape(patch)} has more than {MAX_PATCH_VOXELS} voxels; choose a smaller one"
        )
    factor = 2**halvings
    rule = f"its sides must be {'multiples of' if divisible else 'at least'} {factor}, one at least {2 * factor}"
    # Instance normalisation of a single voxel is undefined.
    compute_feature_map_shape(
        name, patch, lambda side: 0 if divisible and side % factor else side // factor, at_least=2, rule=rule
    )
