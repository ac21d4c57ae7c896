"""NIfTI files, used only after the header and the gzip checksum have been verified.

nibabel stops reading a ``.nii.gz`` once it has enough bytes. It therefore never reaches the checksum at the end, and
most damaged files load with wrong voxels. It also allocates the size that a header declares, however large.
"""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes
from nibabel.openers import ImageOpener

from ...core.errors import DataError, format_shape

MAX_HEADER_BYTES = 2**20
"""Most bytes before the voxels (header and extensions), and most bytes after them."""
MAX_VALUES = 2**28
"""Most voxels of an image whose shape is not known beforehand, over all channels: 1 GiB in float32."""
SPACING_MM = (0.1, 20.0)
SPACING_TOLERANCE = 0.02
LABEL_TOLERANCE = 1e-3
"""Largest distance of a label from a whole number: slopes and float32 leave 0.9999 or 0.99999994."""
MAX_VOXEL = 1e15
"""Largest absolute value of a voxel: in float32, the squares of a volume with larger ones sum to infinity."""
_CHUNK = 2**20


def read_nifti(
    file: Path,
    shape: Sequence[int] | None,
    spacing: Sequence[float] | None = None,
    *,
    canonical: bool = True,
    axes: int = 3,
) -> Any:
    """Read the complete image of a file.

    Nothing is allocated from the header before the header has been checked.

    Args:
        file: ``.nii`` or ``.nii.gz``.
        shape: expected shape of the voxels, in any order of axes; a fourth axis may have length 1. None: any number of
            voxels along ``axes`` axes, and one more of channels, of at most ``MAX_VALUES`` values.
        spacing: expected size of the voxels in mm, in any order of axes; None: any size from 0.1 to 20.
        canonical: turn the image to RAS+ orientation; False, and where it is plane: as it is stored.
        axes: axes of a volume: 3, or 2 for plane images.

    Raises:
        DataError: the shape or the spacing differs, the affine or the data type is unusable, the orientation that an
            image is turned from is not known, or the file is damaged.
    """
    try:
        image = nib.load(file)
        _check_header(file, image, shape, spacing, axes)
        if file.suffix == ".gz":
            image = type(image).from_bytes(_decompress(file, _compute_length(image.header)))
        if not canonical or axes != 3:
            return image
        # nibabel would guess that the first axis runs to the left, which other programs do not.
        if not (image.header["sform_code"] or image.header["qform_code"]):
            raise DataError(
                f"{file.name}: the header does not say which side is left (sform_code and qform_code are 0); set sform "
                "or qform from the original data"
            )
        return nib.as_closest_canonical(image)
    except FileNotFoundError as error:
        raise DataError(f"missing file {file.name}") from error
    except DataError:
        raise
    # A damaged header can make nibabel raise any exception.
    except Exception as error:
        raise DataError(f"corrupt file {file.name}: {error}. Copy or convert it again") from error


def _check_header(
    file: Path, image: Any, shape: Sequence[int] | None, spacing: Sequence[float] | None, axes: int
) -> None:
    """Refuse an image whose header is unusable or unexpected; no voxel is read."""
    if not isinstance(image, (nib.Nifti1Image, nib.Nifti2Image)):
        raise DataError(f"{file.name} is not a NIfTI file but {type(image).__name__}; convert it")
    # nibabel reads the header's own bytes as voxels where they are said to begin at byte 0.
    if image.dataobj.offset < int(image.header["sizeof_hdr"]):
        raise DataError(
            f"{file.name}: the voxels begin at byte {image.dataobj.offset}, in the header; convert it again"
        )
    image_shape = tuple(image.shape[:3]) if set(image.shape[3:]) <= {1} else tuple(image.shape)
    if shape is None:
        _check_axes(file, image_shape, axes)
    elif sorted(image_shape) != sorted(shape):
        raise DataError(
            f"wrong shape {format_shape(image_shape)} in {file.name}; expected {format_shape(shape)}: set task.shape "
            "to the shape of all your volumes, or resample this one"
        )
    if image.get_data_dtype().kind not in "buif":
        raise DataError(f"{file.name} contains {image.get_data_dtype()}; expected one number per voxel: convert it")
    if not np.isfinite(image.affine).all() or abs(np.linalg.det(image.affine[:3, :3])) < 1e-6:
        raise DataError(f"{file.name}: the affine does not map voxels to space; set sform or qform again")
    # nibabel reads a voxel of 0 mm as one of 1 mm.
    with ImageOpener(file) as stream:
        stored = type(image.header).from_fileobj(stream, check=False)
    if not stored["sform_code"] and not stored["pixdim"][1 : axes + 1].all():
        raise DataError(
            f"{file.name}: voxels of {format_shape(stored['pixdim'][1:4])} mm in the header; correct pixdim"
        )
    sides = voxel_sizes(image.affine)
    description = f"{file.name}: voxels of {format_shape(sides)} mm"
    if not all(SPACING_MM[0] <= side <= SPACING_MM[1] for side in sides):
        raise DataError(f"{description}; expected {SPACING_MM[0]} to {SPACING_MM[1]} mm per side")
    if spacing is not None and not np.allclose(sorted(sides), sorted(spacing), rtol=SPACING_TOLERANCE):
        raise DataError(f"{description}; expected {format_shape(spacing)} mm: resample it")


def read_values(file: Path, image: Any) -> np.ndarray:
    """Return the values of an image as float32, without the axes of length 1 after the fourth, which NIfTI allows.

    Raises:
        DataError: the file is damaged.
    """
    try:
        values = np.asarray(image.dataobj, dtype=np.float32)
    except Exception as error:
        raise DataError(f"corrupt file {file.name}: {error}. Copy or convert it again") from error
    return values.reshape(values.shape[:4])


def check_voxels(file: Path, voxels: np.ndarray) -> None:
    """Refuse voxels ``(...)`` with which a network cannot compute.

    Raises:
        DataError: voxels are NaN, infinite, all equal, or so large that float32 cannot standardise the volume.
    """
    if bad := int(np.count_nonzero(~np.isfinite(voxels))):
        raise DataError(f"{bad} voxels of {file.name} are NaN or infinite; set them to 0 if they are background")
    largest = float(np.abs(voxels).max(initial=0))
    if largest > MAX_VOXEL:
        raise DataError(f"{file.name}: a voxel of {largest:.3g}; expected at most {MAX_VOXEL:g}: rescale the image")
    if voxels.min() == voxels.max():
        raise DataError(f"all voxels of {file.name} are equal: the image is empty")


def round_labels(file: Path, values: np.ndarray) -> np.ndarray:
    """Return the whole numbers of a label map that was stored as floats, of the same type.

    Raises:
        DataError: a value is further from a whole number than rounding while storing explains.
    """
    whole: np.ndarray = np.rint(values)
    if len(wrong := values[~(np.abs(values - whole) <= LABEL_TOLERANCE)]):
        raise DataError(
            f"{file.name}: label {wrong[0]:.9g}; expected whole numbers: resample a label map with nearest neighbours"
        )
    return whole


def _check_axes(file: Path, shape: tuple[int, ...], axes: int) -> None:
    """Refuse an image that is no volume, or too large.

    Raises:
        DataError: an image is no volume, or too large.
    """
    if len(shape) not in (axes, axes + 1) or min(shape) < 1:
        expected = "a volume, or one per channel" if axes == 3 else f"{axes} axes, and one more of channels"
        raise DataError(f"wrong shape {format_shape(shape)} in {file.name}; expected {expected}")
    # Python's integers do not overflow, as a product of NumPy's would for a hostile header.
    if math.prod(shape) > MAX_VALUES:
        raise DataError(f"{file.name}: {format_shape(shape)} voxels; expected at most {MAX_VALUES} in all: crop it")


def _compute_length(header: Any) -> int:
    """Return the length in bytes of a complete file with this (checked) header."""
    start = int(header["vox_offset"])
    if not 0 <= start <= MAX_HEADER_BYTES:
        raise DataError(f"the voxels begin at byte {start}; expected at most {MAX_HEADER_BYTES}")
    return start + int(np.prod(header.get_data_shape(), dtype=np.int64)) * int(header.get_data_dtype().itemsize)


def _decompress(file: Path, length: int) -> bytes:
    """Return all bytes of a gzip file; refuse one that expands far beyond ``length``.

    The stream is read to its end, because only then does gzip verify the checksum.
    """
    parts, total = [], 0
    try:
        with gzip.open(file) as stream:
            while part := stream.read(_CHUNK):
                total += len(part)
                if total > length + MAX_HEADER_BYTES:
                    raise DataError(f"{file.name} inflates to more than the {length} bytes that its header declares")
                parts.append(part)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"corrupt file {file.name}: {error}. Copy or convert it again") from error
    return b"".join(parts)
