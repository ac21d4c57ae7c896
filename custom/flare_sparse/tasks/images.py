"""Classification of small images.

A data set is one npz file with arrays ``<split>_images`` and ``<split>_labels``, as in MedMNIST. Encoded images are
stored as ``<split>_blob`` (JPEG or PNG files one after another) and ``<split>_ends`` (the end offset of each) instead.
The splits of a file are pooled, because each site makes its own. An example's identifier is ``<split>/<number>``.
"""

import io
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile
from zlib import error as ZlibError  # noqa: N812

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..core.errors import DataError, require_extra
from .classes import ClassesConfig, compute_binary_metrics, compute_cross_entropy
from .data.augmentation import Augmentation
from .models import ModelConfig, require_input
from .models.shapes import Image
from .task import Cohort, Examples, Metric, SiteData, Task, build_examples


class ImageConfig(ClassesConfig):
    """Shape and classes of the images; the defaults fit PneumoniaMNIST."""

    model: Annotated[ModelConfig, require_input("image")] = ModelConfig(name="image_cnn")
    """network and its settings"""
    image: Image = (1, 28, 28)
    """channels, height and width of an image"""
    augmentation: Augmentation = Field(default_factory=Augmentation)
    """random changes of the training images; none by default"""
    images_per_split: int | None = Field(None, ge=1)
    """use only the first images of each split in the file; null: all"""


class ImageClassification(Task):
    """Prediction of an image's class; batches are ``(uint8 (B, C, H, W), int64 (B,))``."""

    Config = ImageConfig
    config: ImageConfig
    metric = Metric("accuracy", "", "max")
    kind = "classes"
    reads = "an npz file with arrays <split>_images (uint8) and <split>_labels, as in MedMNIST"

    def model(self) -> nn.Module:
        """Return the configured network with one logit per class."""
        return self.config.model.build(image=self.config.image, outputs=self.config.classes)

    def cohort(self, path: Path) -> Cohort:
        """Return the images with their ``label``."""
        return read_cohort(path, self.config.images_per_split)

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read the images of a site."""
        ids = data.select(self.cohort(data.path).ids)
        return build_examples(self.config.split.assign(ids, seed), partial(self._read_dataset, data.path))

    def _read_dataset(self, path: Path, ids: Sequence[str]) -> TensorDataset:
        channels, height, width = self.config.image
        expected = (height, width, channels)
        images, labels = read_images(path, ids)
        if ids and images.shape[1:] != expected:
            raise DataError(
                f"{path}: images are {images.shape[1:]} (height, width, channels); expected {expected}. Set task.image "
                "to (channels, height, width)"
            )
        if ids and not 0 <= labels.min() <= labels.max() < self.config.classes:
            raise DataError(
                f"{path}: labels range from {labels.min()} to {labels.max()}; expected 0 to {self.config.classes - 1}. "
                "Set task.classes to the number of classes"
            )
        return TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels))

    def augment(self, batch: Any, generator: torch.Generator) -> Any:
        """Return the minibatch with changed images, float32 and scaled; their last axis is left to right."""
        images, labels = batch
        if self.config.augmentation == Augmentation():
            return batch
        return self.config.augmentation.apply(_scale_pixels(images), generator, mirrored_axis=1)[0], labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross-entropy, a scalar."""
        images, labels = batch
        return compute_cross_entropy(model(_scale_pixels(images)), labels, self.config.class_weights)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return probabilities ``(B, classes)`` and true classes ``(B,)``."""
        images, labels = batch
        return torch.softmax(model(_scale_pixels(images)), dim=1), labels

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the accuracy; with two classes also F1 of class 1 and the area under the ROC curve."""
        accuracy = (predictions.argmax(dim=1) == targets).double().mean().item()
        return {
            **(compute_binary_metrics(predictions[:, 1], targets) if self.config.classes == 2 else {}),
            "accuracy": accuracy,
        }


def _scale_pixels(images: Tensor) -> Tensor:
    """Scale pixels from 0..255 to -1..1; the constants need no statistics of any site.

    Float images are scaled already.
    """
    return images if images.is_floating_point() else images.float() / 127.5 - 1


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
        images = {split: _open_split(arrays, split) for split in {split for split, _ in keys}}
        selected = [images[split](number) for split, number in keys]
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


def _open_split(arrays: Mapping[str, np.ndarray], split: str) -> Callable[[int], np.ndarray]:
    """Return what reads an image ``(height, width, channels)`` of a split by its number."""
    if f"{split}_images" in arrays:
        images = arrays[f"{split}_images"]
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise ValueError(
                f"{split}_images is {images.dtype} {images.shape}; expected uint8 (n, h, w) or (n, h, w, c)"
            )
        return lambda number: np.atleast_3d(images[number])
    if f"{split}_blob" in arrays and f"{split}_ends" in arrays:
        blob, ends = arrays[f"{split}_blob"].tobytes(), [0, *arrays[f"{split}_ends"].tolist()]
        return lambda number: _decode(blob[ends[number] : ends[number + 1]])
    raise ValueError(f"neither {split}_images nor {split}_blob and {split}_ends")


def _decode(data: bytes) -> np.ndarray:
    with require_extra("an encoded image", "images", DataError):
        from PIL import Image
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
