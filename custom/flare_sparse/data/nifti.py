"""NIfTI files, believed only after the header has been looked at and every byte of a compressed one has been checked.

nibabel reads a ``.nii.gz`` until it has enough, so the checksum at its end is never seen and most damaged files load
with other voxels; and it allocates what a header asks for.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes

from ..errors import DataError

LONGEST_HEADER = 2**20
"""Bytes before the voxels, extensions included, and after them."""
SPACING_MM = (0.1, 20.0)
SPACING_TOLERANCE = 0.02
_CHUNK = 2**20


def read_nifti(file: Path, shape: Sequence[int], spacing: Sequence[float] | None = None) -> Any:
    """The image in a file, complete and in RAS+ orientation.

    Args:
        file: ``.nii`` or ``.nii.gz``.
        shape: of the voxels, in any order of axes; a fourth axis may have length 1.
        spacing: of the voxels in mm, in any order of axes; None: any between 0.1 and 20.

    Raises:
        DataError: another shape or spacing, an unusable affine or type, or a damaged file; nothing is allocated from
            what a header says before it has been checked.
    """
    try:
        image = nib.load(file)
        _look(file, image, shape, spacing)
        if file.suffix == ".gz":
            image = type(image).from_bytes(_inflated(file, _length(image.header)))
        return nib.as_closest_canonical(image)
    except FileNotFoundError as error:
        raise DataError(f"missing file {file.name}") from error
    except DataError:
        raise
    except Exception as error:  # a damaged header can make nibabel raise anything
        raise DataError(f"corrupt file {file.name}: {error}. Copy or convert it again") from error


def _look(file: Path, image: Any, shape: Sequence[int], spacing: Sequence[float] | None) -> None:
    """The header alone."""
    if not isinstance(image, (nib.Nifti1Image, nib.Nifti2Image)):
        raise DataError(f"{file.name} is no NIfTI file but {type(image).__name__}; convert it")
    found = tuple(image.shape[:3]) if set(image.shape[3:]) <= {1} else tuple(image.shape)
    if sorted(found) != sorted(shape):
        raise DataError(f"wrong shape {text(found)} in {file.name}; expected {text(shape)}")
    if image.get_data_dtype().kind not in "buif":
        raise DataError(f"{file.name} holds {image.get_data_dtype()}; expected one number a voxel: convert it")
    if not np.isfinite(image.affine).all() or abs(np.linalg.det(image.affine[:3, :3])) < 1e-6:
        raise DataError(f"{file.name}: the affine does not map voxels to space; set sform or qform again")
    sides = voxel_sizes(image.affine)
    if not all(SPACING_MM[0] <= side <= SPACING_MM[1] for side in sides):
        raise DataError(
            f"{file.name}: voxels of {text(sides)} mm; expected {SPACING_MM[0]} to {SPACING_MM[1]} mm a side"
        )
    if spacing is not None and not np.allclose(sorted(sides), sorted(spacing), rtol=SPACING_TOLERANCE):
        raise DataError(f"{file.name}: voxels of {text(sides)} mm; expected {text(spacing)} mm: resample it")


def _length(header: Any) -> int:
    """Bytes of a whole file with this header, which has been looked at."""
    start = int(header["vox_offset"])
    if not 0 <= start <= LONGEST_HEADER:
        raise DataError(f"the voxels begin at byte {start}; expected at most {LONGEST_HEADER}")
    return start + int(np.prod(header.get_data_shape(), dtype=np.int64)) * int(header.get_data_dtype().itemsize)


def _inflated(file: Path, length: int) -> bytes:
    """All bytes of a gzip file, read to its end so that its checksum is seen; never more than it may have."""
    parts, total = [], 0
    try:
        with gzip.open(file) as stream:
            while part := stream.read(_CHUNK):
                total += len(part)
                if total > length + LONGEST_HEADER:
                    raise DataError(f"{file.name} inflates to more than the {length} bytes that its header speaks of")
                parts.append(part)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"corrupt file {file.name}: {error}. Copy or convert it again") from error
    return b"".join(parts)


def text(numbers: Sequence[float]) -> str:
    """``52x64x52``."""
    return "x".join(f"{number:g}" for number in numbers)
