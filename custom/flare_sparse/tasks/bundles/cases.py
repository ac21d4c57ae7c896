"""Cases of a MONAI bundle: a site's files after the bundle's deterministic transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...data.cases import Case, CaseFiles
from ...errors import DataError, describe_exception
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
        DataError: a file is missing or damaged, or a transform fails.
    """
    if problem := files.problem or files.label_problem:
        raise DataError(problem)
    if files.labels is None:
        raise DataError("missing file: there is no label map")
    images = [str(file) for file in files.images]
    item: Any = {"image": images if len(images) > 1 else images[0], "label": str(files.labels)}
    for transform in transforms:
        try:
            item = transform(item)
        # Readers and transforms raise errors of many classes.
        except Exception as error:
            raise DataError(f"{type(transform).__name__} of the bundle fails: {describe_cause(error)}") from error
    image, label = (item[key] for key in KEYS)
    if not (isinstance(image, Tensor) and isinstance(label, Tensor) and image.ndim == label.ndim):
        raise DataError("the bundle's transforms give no image and label map with one axis of channels each")
    if not bool(torch.isfinite(image).all()):
        raise DataError("voxels of the image are NaN or infinite")
    return {"image": image, "label": label}


def describe_cause(error: BaseException) -> str:
    """Return the text of the error that MONAI wraps in others, which name the object and not the reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    return describe_exception(error)


def strip_metadata(volume: Tensor) -> Tensor:
    """Return a plain tensor; MONAI's carries the affine and the file's name along."""
    plain: Tensor = volume.as_tensor() if hasattr(volume, "as_tensor") else volume
    return plain
