"""Volumes: from a NIfTI file to a network's input, checked before anything is learned from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..errors import DataError
from .nifti import read_nifti, text


def preparation(downsample: int) -> Callable[[Any], Any]:
    """Voxels (D, H, W) to a float32 tensor (1, d, h, w): means of cubes, then z-scored over the volume.

    A cube has ``downsample`` voxels a side; what does not fill one is cut off at the end of an axis. FedSparsify
    section 4: (image - mean) / standard deviation, of each volume by itself.
    """
    from monai.transforms import Compose, EnsureChannelFirst, EnsureType, NormalizeIntensity

    prepare: Callable[[Any], Any] = Compose(
        [
            EnsureChannelFirst(channel_dim="no_channel"),
            nn.AvgPool3d(downsample),
            NormalizeIntensity(),
            EnsureType(dtype=torch.float32, track_meta=False),
        ]
    )
    return prepare


def read_voxels(file: Path, shape: Sequence[int], spacing: Sequence[float] | None = None) -> np.ndarray:
    """Voxels of a NIfTI file, float32 ``shape``, in RAS+ orientation.

    Args:
        file: ``.nii`` or ``.nii.gz``.
        shape: of the voxels.
        spacing: of the voxels in mm; None: not checked beyond what an image of a body may have.

    Raises:
        DataError: the file is missing, damaged or of another shape or spacing, its affine is unusable, or its voxels
            are not finite or all equal.
    """
    image = read_nifti(file, shape, spacing)
    try:
        voxels = np.asarray(image.dataobj, dtype=np.float32).reshape(image.shape[:3])
    except Exception as error:
        raise DataError(f"corrupt file {file.name}: {error}. Copy or convert it again") from error
    if voxels.shape != tuple(shape):
        raise DataError(f"wrong shape {text(voxels.shape)} of {file.name} in RAS orientation; expected {text(shape)}")
    if bad := int(np.count_nonzero(~np.isfinite(voxels))):
        raise DataError(f"{bad} voxels of {file.name} are NaN or infinite")
    if voxels.min() == voxels.max():
        raise DataError(f"all voxels of {file.name} are equal: there is no image in it")
    return voxels


@dataclass(frozen=True)
class Item:
    """One subject's example.

    Attributes:
        file: NIfTI file.
        target: what is to be learned.
        prepared: the network's input (1, d, h, w) where it is kept in memory.
    """

    file: Path
    target: float
    prepared: Tensor | None


class Volumes(Dataset[tuple[Tensor, Tensor]]):
    """Prepared volumes (1, d, h, w) with their targets (1,); those not in memory are read when they are asked for.

    Args:
        items: the examples.
        shape: of the voxels on disk.
        downsample: see :func:`preparation`.
        spacing: of the voxels on disk, in mm; None: any.
    """

    def __init__(
        self, items: Sequence[Item], shape: Sequence[int], downsample: int, spacing: Sequence[float] | None = None
    ):
        self._items, self._shape, self._spacing = items, shape, spacing
        self._prepare = preparation(downsample)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Volume and target of one subject.

        Raises:
            DataError: its file has become unreadable.
        """
        item = self._items[index]
        target = torch.tensor([item.target])
        if item.prepared is not None:
            return item.prepared, target
        return self._prepare(read_voxels(item.file, self._shape, self._spacing)), target
