"""Image data sets in one npz file.

The file has arrays ``<split>_images`` and ``<split>_labels``, as in MedMNIST. Encoded images are stored as
``<split>_blob`` (JPEG or PNG files one after another) and ``<split>_ends`` (the end offset of each) instead.

The splits of a file are pooled, because each site makes its own. An example's identifier is ``<split>/<number>``.
"""

import io
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import error as ZlibError  # noqa: N812

import numpy as np

from ...core.errors import DataError
from ..task import Cohort

_LABELS = "_labels"


def read_cohort(path: Path, images_per_split: int | None = None) -> Cohort:
    """Return the identifiers and labels of all images, or of the first ``images_per_split`` of each split.

    Raises:
        DataError: the file is missing or malformed.
    """
    with _open(path) as arrays:
        labels = {split: values[:images_per_split] for split, values in _read_labels(arrays).items()}
    ids = (f"{split}/{number}" for split, values in labels.items() for number in range(len(values)))
    return Cohort(tuple(ids), {"label": np.concatenate(list(labels.values()))})


def read_images(path: Path, ids: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Read images and labels in the order of ``ids``.

    Returns:
        Images, uint8 ``(n, height, width, channels)``, and labels, int64 ``(n,)``.

    Raises:
        DataError: the file is missing or malformed, or an identifier is not in it.
    """
    with _open(path) as arrays:
        labels = _read_labels(arrays)
        keys = [_parse_id(name, labels) for name in ids]
        numbers = {split: sorted({number for s, number in keys if s == split}) for split, _ in keys}
        images = {split: dict(zip(n, _read_split(arrays, split, n), strict=True)) for split, n in numbers.items()}
        selected = [images[split][number] for split, number in keys]
        stacked = np.stack(selected) if selected else np.empty((0, 1, 1, 1), np.uint8)
        return stacked, np.array([labels[split][number] for split, number in keys], dtype=np.int64)


def _read_labels(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [name for name in arrays if name.endswith(_LABELS)]
    if not names:
        raise ValueError("no array <split>_labels")
    labels = {name.removesuffix(_LABELS): arrays[name].reshape(-1) for name in names}
    if wrong := [split for split, values in labels.items() if values.dtype.kind not in "iu"]:
        raise ValueError(f"{wrong[0]}_labels is {labels[wrong[0]].dtype}; expected whole numbers")
    return labels


def _parse_id(name: str, labels: Mapping[str, np.ndarray]) -> tuple[str, int]:
    """Return the split and the number in ``<split>/<number>``."""
    split, _, number = name.rpartition("/")
    if split not in labels or not number.isdecimal() or int(number) >= len(labels[split]):
        known = ", ".join(f"{split}/0 to {split}/{len(values) - 1}" for split, values in labels.items())
        raise ValueError(f"no image {name!r}; the file has {known}")
    return split, int(number)


def _read_split(arrays: Mapping[str, np.ndarray], split: str, numbers: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the images ``numbers`` of a split, each ``(height, width, channels)``."""
    if f"{split}_images" in arrays:
        images = arrays[f"{split}_images"]
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise ValueError(
                f"{split}_images is {images.dtype} {images.shape}; expected uint8 (n, h, w) or (n, h, w, c)"
            )
        yield from (np.atleast_3d(images[number]) for number in numbers)
    elif f"{split}_blob" in arrays and f"{split}_ends" in arrays:
        blob, ends = arrays[f"{split}_blob"].tobytes(), [0, *arrays[f"{split}_ends"].tolist()]
        yield from (_decode(blob[ends[number] : ends[number + 1]]) for number in numbers)
    else:
        raise ValueError(f"neither {split}_images nor {split}_blob and {split}_ends")


def _decode(data: bytes) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("encoded images need pillow; pip install 'flare-sparse[images]'") from error
    with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
        return np.atleast_3d(np.asarray(image))


@contextmanager
def _open(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, EOFError, ValueError, LookupError, AttributeError, TypeError, RuntimeError, MemoryError,
            struct.error, BadZipFile, ZlibError) as error:  # fmt: skip
        raise DataError(
            f"{path}: {error}. Expected an npz file with <split>_images (or <split>_blob and <split>_ends) and "
            "<split>_labels"
        ) from error
