"""Volumes: from a NIfTI file to a network's input, with every check made before training."""

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import DataError
from .nifti import check_voxels, format_shape, read_nifti, read_values

Normalization = Literal["volume", "brain", "brain_first"]
_IQR_OF_NORMAL = 1.349
"""Interquartile range of a normal distribution in units of its standard deviation."""


def build_preprocessing(downsample: int, normalization: Normalization = "volume") -> Callable[[np.ndarray], Tensor]:
    """Return a transform from voxels ``(D, H, W)`` to a float32 tensor ``(1, d, h, w)``.

    The transform averages cubes of ``downsample`` voxels per side and drops the remainder at the end of each axis.

    Args:
        downsample: voxels per side of a cube.
        normalization: ``volume`` z-scores each volume by its own mean and standard deviation (FedSparsify, section 4);
            ``brain`` is :func:`normalize_brain` after the averaging; ``brain_first`` before it, so that a cube at the
            edge of the brain does not depend on how much background it contains.
    """
    pool = nn.AvgPool3d(downsample)
    steps: dict[Normalization, tuple[Callable[[Tensor], Tensor], ...]] = {
        "volume": (pool, standardize),
        "brain": (pool, normalize_brain),
        "brain_first": (normalize_brain, pool),
    }

    def preprocess(voxels: np.ndarray) -> Tensor:
        return reduce(lambda volume, step: step(volume), steps[normalization], torch.from_numpy(voxels)[None])

    return preprocess


def standardize(volume: Tensor) -> Tensor:
    """Return a volume with mean 0 and standard deviation 1; one whose values are all equal becomes 0."""
    return (volume - volume.mean().item()) / (volume.std(correction=0).item() or 1.0)


def normalize_brain(volume: Tensor) -> Tensor:
    """Return a volume with median 0 and robust standard deviation 1 inside the brain, and 0 outside.

    The brain is where a volume, from which everything else was removed, is not 0. Neither background nor a few bright
    vessels change the scale, as they do that of a z-score of the whole volume.

    Args:
        volume: float32, any shape; a volume without values other than 0 stays as it is.
    """
    brain = volume != 0
    values = volume[brain].double()
    if not values.numel():
        return volume
    lower, median, upper = np.quantile(values.numpy(), [0.25, 0.5, 0.75])
    # A quantised volume may have equal quartiles.
    scale = (upper - lower) / _IQR_OF_NORMAL or float(values.std(correction=0)) or 1.0
    return torch.where(brain, (volume - float(median)) / scale, 0.0)


def read_voxels(file: Path, shape: Sequence[int], spacing: Sequence[float] | None = None) -> np.ndarray:
    """Read the voxels of a NIfTI file: float32 ``shape``, in RAS+ orientation.

    Args:
        file: ``.nii`` or ``.nii.gz``.
        shape: expected shape of the voxels.
        spacing: expected size of the voxels in mm; None: any size from 0.1 to 20.

    Raises:
        DataError: the file is missing, damaged, or of another shape or spacing; its affine is unusable; or its voxels
            are not finite, too large or all equal.
    """
    image = read_nifti(file, shape, spacing)
    voxels = read_values(file, image).reshape(image.shape[:3])
    if voxels.shape != tuple(shape):
        raise DataError(
            f"wrong shape {format_shape(voxels.shape)} of {file.name} in RAS orientation; expected "
            f"{format_shape(shape)}: set task.shape, or reorient this one"
        )
    check_voxels(file, voxels)
    return voxels
