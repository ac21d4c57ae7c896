"""MONAI's classifiers of volumes, which published encoders are pre-trained as; newly initialised, they are small."""

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from ...core.errors import ConfigError, require_extra
from .shapes import Count, Share, Volume, compute_feature_map_shape

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


def vit3d(
    *,
    volume: Volume = (26, 32, 26),
    outputs: Count = 1,
    patch: Annotated[int, Field(ge=2, le=64)] = 8,
    width: Annotated[int, Field(ge=8, le=2048)] = 96,
    hidden: Annotated[int, Field(ge=8, le=8192)] = 192,
    layers: Annotated[int, Field(ge=1, le=48)] = 4,
    heads: Annotated[int, Field(ge=1, le=32)] = 4,
    dropout: Share = 0.0,
) -> nn.Module:
    """Build MONAI's ViT (Dosovitskiy et al. 2021) with a class token; needs einops.

    The default has 351,841 parameters; MONAI's own is of patch 16, width 768, hidden 3072, 12 layers and 12 heads.

    Args:
        volume: (depth, height, width) of an input in voxels; what is left of whole patches is not seen.
        outputs: numbers per volume.
        patch: voxels of a cubic patch per side.
        width: size of a token, a multiple of ``heads``.
        hidden: units of the layer in each block.
        layers: transformer blocks.
        heads: attention heads.
        dropout: dropout rate.

    Raises:
        ConfigError: no patch fits, the width is no multiple of the heads, or einops is not installed.
    """
    compute_feature_map_shape("vit3d", volume, lambda size: size // patch)
    if width % heads:
        raise ConfigError(f"model 'vit3d': width {width} is no multiple of heads, {heads}")
    from .transformer import VolumeTransformer

    with require_extra("model 'vit3d'", "segmentation"):
        network: nn.Module = VolumeTransformer(
            in_channels=1,
            img_size=volume,
            patch_size=patch,
            hidden_size=width,
            mlp_dim=hidden,
            num_layers=layers,
            num_heads=heads,
            classification=True,
            num_classes=outputs,
            dropout_rate=dropout,
            # No activation: the outputs are logits or a standardised number.
            post_activation="",
        )
    return network
