"""Classes of small images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ..data.images import cohort, read_images
from ..data.split import train_test
from ..errors import DataError
from ..models import ModelConfig
from ..models.config import reading
from ..models.fields import Image
from ..task import Cohort, Examples, Metric, SiteData, Task, TaskConfig
from .classes import binary_figures


class ImageConfig(TaskConfig):
    """What the images are; the defaults are those of PneumoniaMNIST."""

    model: Annotated[ModelConfig, reading("image")] = Field(
        ModelConfig(name="image_cnn"), description="network, with its settings"
    )
    image: Image = Field((1, 28, 28), description="channels, height and width")
    classes: int = Field(2, ge=2, le=10_000, description="number of classes")
    per_split: int | None = Field(
        None, ge=1, description="use the first images of each split of the file only; null: all"
    )


class ImageClassification(Task):
    """The class of an image; batches are (uint8 (B, C, H, W), int64 (B,))."""

    Config = ImageConfig
    config: ImageConfig
    metric = Metric("accuracy", "", "max")

    def model(self) -> nn.Module:
        """The configured network with one logit a class."""
        return self.config.model.build(image=self.config.image, outputs=self.config.classes)

    def cohort(self, path: Path) -> Cohort:
        """The images with their ``label``."""
        return cohort(path, self.config.per_split)

    def load(self, data: SiteData, seed: int) -> Examples:
        """The images of a site; 20 % are for testing."""
        ids = cohort(data.path, self.config.per_split).ids if data.subset is None else data.subset
        train, test = train_test(ids, seed)
        return Examples(self._images(data.path, train), self._images(data.path, test))

    def _images(self, path: Path, ids: tuple[str, ...]) -> TensorDataset:
        channels, height, width = self.config.image
        images, labels = read_images(path, ids)
        if ids and images.shape[1:] != (height, width, channels):
            raise DataError(
                f"{path}: images are {images.shape[1:]} (height, width, channels); expected {(height, width, channels)}. "
                "Set task.image to (channels, height, width)"
            )
        if ids and not 0 <= labels.min() <= labels.max() < self.config.classes:
            raise DataError(
                f"{path}: labels go from {labels.min()} to {labels.max()}; expected 0 to {self.config.classes - 1}. "
                "Set task.classes to the number of classes"
            )
        return TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return functional.cross_entropy(model(_inputs(images)), labels)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Probabilities (B, classes) and true classes (B,)."""
        images, labels = batch
        return torch.softmax(model(_inputs(images)), dim=1), labels

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Accuracy; with two classes also F1 of class 1 and the area under the ROC curve."""
        accuracy = (predictions.argmax(dim=1) == targets).double().mean().item()
        return {
            **(binary_figures(predictions[:, 1], targets) if self.config.classes == 2 else {}),
            "accuracy": accuracy,
        }


def _inputs(images: Tensor) -> Tensor:
    """Pixels 0 to 255 as -1 to 1: no statistic of any site is needed."""
    return images.float() / 127.5 - 1
