"""Patches of volumes: a random one around a class for training, the central one for scores."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_DRAWS = 6
"""Random numbers of a patch: whether it has a class, which one, which of its voxels, and a position along each axis."""


def sample_patch(
    image: Tensor, labels: Tensor, patch: Sequence[int], foreground: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a random patch of an image and its labels.

    With the probability ``foreground``, a class of the volume is drawn, then one of its voxels, and the patch is
    centred on it as far as the volume allows; each class is as likely as any other. Otherwise the position is uniform.

    Args:
        image: ``(channels, d, h, w)``.
        labels: ``(d, h, w)``, 0 for background.
        patch: shape of a patch; zeros surround a volume that is smaller.
        foreground: share of the patches that are centred on a class.
        generator: source of the random numbers; every patch takes the same number of them.
    """
    has_class, which, voxel, *position = torch.rand(_DRAWS, generator=generator, dtype=torch.float64).tolist()
    centre, classes = None, labels.unique()
    classes = classes[classes != 0]
    if has_class < foreground and len(classes):
        voxels = (labels == classes[int(which * len(classes))]).nonzero()
        centre = voxels[int(voxel * len(voxels))].tolist()
    starts = []
    for axis, (length, side) in enumerate(zip(labels.shape, patch, strict=True)):
        last = max(length - side, 0)
        start = int(position[axis] * (last + 1)) if centre is None else centre[axis] - side // 2
        starts.append(min(max(start, 0), last))
    return cut_patch(image, starts, patch), cut_patch(labels, starts, patch)


def take_central_patch(image: Tensor, labels: Tensor, patch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the patch in the middle of all labelled voxels, or of the volume if there are none."""
    voxels, starts = labels.nonzero(), []
    for axis, (length, side) in enumerate(zip(labels.shape, patch, strict=True)):
        middle = int(voxels[:, axis].min() + voxels[:, axis].max() + 1) // 2 if len(voxels) else length // 2
        starts.append(min(max(middle - side // 2, 0), max(length - side, 0)))
    return cut_patch(image, starts, patch), cut_patch(labels, starts, patch)


def cut_patch(volume: Tensor, starts: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Return a patch of the last three axes; zeros fill what the volume lacks, in equal parts on both sides.

    MONAI's sliding window fills in the same way, so that training and inference see a small volume alike.
    """
    padding: list[int] = []
    for axis, (start, side) in enumerate(zip(starts, patch, strict=True), start=-3):
        available = min(side, volume.shape[axis] - start)
        volume, missing = volume.narrow(axis, start, available), side - available
        padding = [missing // 2, missing - missing // 2, *padding]
    return functional.pad(volume, padding) if any(padding) else volume
