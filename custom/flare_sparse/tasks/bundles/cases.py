"""Cases of a MONAI bundle: a site's files after the bundle's deterministic transforms."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.errors import DataError, describe_exception
from ..data.nifti import format_shape
from ..data.segmentation import AFFINE_TOLERANCE_MM, measure_distance

Item = Mapping[str, Tensor]
"""Image ``(channels, d, h, w)`` of a case and its label, a map ``(1, d, h, w)`` or a class ``(1,)``, by name."""


def check_label_map(label: Any, image: Tensor, file: str) -> Tensor:
    """Return a label map after a check that it has the voxels of an image; ``file`` is named in the error.

    Files of the same space may be stored in different orders of their axes, which only some transforms undo.

    Raises:
        DataError: it is no volume, or shapes or affines, where MONAI keeps them, differ.
    """
    if not (isinstance(label, Tensor) and image.ndim == label.ndim):
        raise DataError("the bundle's transforms give no image and label map with one axis of channels each")
    shape, expected = label.shape[1:], image.shape[1:]
    if shape != expected:
        raise DataError(
            f"{file} is {format_shape(shape)} after the transforms of the bundle, the image {format_shape(expected)}; "
            "expected the same shape: give both keys, image and label, to Spacingd, Resized and every crop"
        )
    affines = [getattr(volume, "affine", None) for volume in (label, image)]
    if len(shape) != 3 or any(affine is None for affine in affines):
        return label
    distance = measure_distance(shape, *(affine.cpu().double().numpy() for affine in affines if affine is not None))
    if distance > AFFINE_TOLERANCE_MM:
        raise DataError(
            f"{file} lies up to {distance:.1f} mm from the image after the transforms of the bundle; expected the same "
            "affine: add Orientationd with both keys, image and label, or store both files in one orientation"
        )
    return label


def describe_cause(error: BaseException) -> str:
    """Return the text of the error that MONAI wraps in others, which name the object and not the reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    return describe_exception(error)


def strip_metadata(volume: Tensor) -> Tensor:
    """Return a plain tensor of numbers; MONAI's carries the affine and the file's name along."""
    plain: Tensor = volume.as_tensor() if hasattr(volume, "as_tensor") else volume
    # No loss subtracts booleans, which ConvertToMultiChannelBasedOnBratsClassesd gives.
    return plain.float() if plain.dtype == torch.bool else plain
