"""Classification of small images."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..core.errors import DataError
from ..core.needs import Needs
from .classes import check_class_weights, compute_binary_metrics, compute_cross_entropy, list_weight_needs
from .data.augmentation import Augmentation
from .data.images import read_cohort, read_images
from .models import ModelConfig, require_input
from .models.shapes import Image
from .task import Cohort, Examples, Metric, SiteData, Task, TaskConfig, build_examples


class ImageConfig(TaskConfig):
    """Shape and classes of the images; the defaults fit PneumoniaMNIST."""

    model: Annotated[ModelConfig, require_input("image")] = ModelConfig(name="image_cnn")
    """network and its settings"""
    image: Image = (1, 28, 28)
    """channels, height and width of an image"""
    classes: int = Field(2, ge=2, le=10_000)
    """number of classes"""
    class_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """weight of an example in the loss, by class; empty: 1. Constants of the job, as [1, 4]"""
    augmentation: Augmentation = Field(default_factory=Augmentation)
    """random changes of the training images; none by default"""
    images_per_split: int | None = Field(None, ge=1)
    """use only the first images of each split in the file; null: all"""

    @model_validator(mode="after")
    def _check_class_weights(self) -> Self:
        check_class_weights(self.class_weights, self.classes)
        return self

    def needs(self) -> Needs:
        return list_weight_needs(self.class_weights)


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
        return self.config.augmentation.apply(_scale_pixels(images), generator, mirrored_axis=1), labels

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
