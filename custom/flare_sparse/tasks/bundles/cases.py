"""Cases of a MONAI bundle: a site's files after the bundle's deterministic transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...core.errors import DataError, describe_exception
from ..data.cases import Case, CaseFiles
from ..data.nifti import format_shape
from ..data.segmentation import AFFINE_TOLERANCE_MM, measure_distance
from .declaration import KEYS

Item = Mapping[str, Tensor]
"""Image ``(channels, d, h, w)`` and label map ``(1, d, h, w)`` of a case, by name."""


class CaseDataset(Dataset[Item]):
    """Cases after their deterministic transforms.

    Args:
        cases: the cases.
        transforms: the transforms, for cases that are not in memory.
    """

    def __init__(self, cases: Sequence[Case[Item]], transforms: Sequence[Any]):
        self._cases, self._transforms = cases, transforms

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, index: int) -> Item:
        """Return one case.

        Raises:
            DataError: a file has become unreadable.
        """
        case = self._cases[index]
        return case.cached or read_case(case.files, self._transforms)


def read_case(files: CaseFiles, transforms: Sequence[Any]) -> Item:
    """Read the files of a case with a bundle's transforms, of which the first one loads them.

    Raises:
        DataError: a file is missing or damaged, a transform fails, or the image and the label map that the transforms
            give do not have the same voxels.
    """
    labels_file, images = files.require_labels(), [str(file) for file in files.images]
    item: Any = {"image": images if len(images) > 1 else images[0], "label": str(labels_file)}
    for transform in transforms:
        try:
            item = transform(item)
        # Readers and transforms raise errors of many classes.
        except Exception as error:
            raise DataError(f"{type(transform).__name__} of the bundle fails: {describe_cause(error)}") from error
    image, label = (item[key] for key in KEYS)
    if not (isinstance(image, Tensor) and isinstance(label, Tensor) and image.ndim == label.ndim):
        raise DataError("the bundle's transforms give no image and label map with one axis of channels each")
    _check_voxels(image, label, labels_file.name)
    if not bool(torch.isfinite(image).all()):
        raise DataError("voxels of the image are NaN or infinite")
    return {"image": image, "label": label}


def _check_voxels(image: Tensor, label: Tensor, file: str) -> None:
    """Check that transforms gave an image and a label map of the same voxels; ``file`` is named in the error.

    Files of the same space may be stored in different orders of their axes, which only some transforms undo.

    Raises:
        DataError: the shapes differ, or the affines, where MONAI keeps them.
    """
    shape, expected = label.shape[1:], image.shape[1:]
    if shape != expected:
        raise DataError(
            f"{file} is {format_shape(shape)} after the transforms of the bundle, the image {format_shape(expected)}; "
            "expected the same shape: give both keys, image and label, to Spacingd, Resized and every crop"
        )
    affines = [getattr(volume, "affine", None) for volume in (label, image)]
    if len(shape) != 3 or any(affine is None for affine in affines):
        return
    distance = measure_distance(shape, *(affine.cpu().double().numpy() for affine in affines if affine is not None))
    if distance > AFFINE_TOLERANCE_MM:
        raise DataError(
            f"{file} lies up to {distance:.1f} mm from the image after the transforms of the bundle; expected the same "
            "affine: add Orientationd with both keys, image and label, or store both files in one orientation"
        )


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
