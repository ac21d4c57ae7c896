"""Classes of short texts, such as the 77 intents of BANKING77: a pre-trained encoder, adapted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ..data.split import train_test
from ..data.tables import read_table
from ..errors import ConfigError, DataError
from ..models.base import base_folder, drawn
from ..models.text import Architecture, text_classifier, tokens
from ..task import Cohort, Examples, Metric, SiteData
from .adaptation import AdaptableTask, AdaptationConfig


class TextConfig(AdaptationConfig):
    """The defaults are those of BANKING77."""

    architecture: Architecture = Field(
        "minilm-l6", description="shape of an encoder without base: for estimates, since it has no tokenizer"
    )
    classes: int = Field(77, ge=2, le=10_000, description="number of classes")
    max_length: int = Field(32, ge=4, le=512, description="tokens of a text; what is longer is cut off")
    text: str = Field("text", description="column of the texts")
    label: str = Field("label", description="column of the classes, whole numbers from 0")
    every: int = Field(1, ge=1, description="use every n-th row of the table only")


class TextClassification(AdaptableTask):
    """The class of a text; batches are (tokens (B, L), attended (B, L), class (B,)), all int64.

    A data set is a table with a column of texts and one of classes; an example's identifier is its row, from 0.
    """

    Config = TextConfig
    config: TextConfig
    metric = Metric("accuracy", "", "max")

    def network(self) -> nn.Module:
        """Encoder and head; the encoder is read where there is a base."""
        folder = base_folder(self.config.base) if self.config.base else None
        return text_classifier(folder, self.config.architecture, self.config.classes)

    def base(self) -> nn.Module:
        """The pre-trained encoder under a head drawn from ``base_seed``."""
        with drawn(self.config.base_seed):
            return self.network()

    def cohort(self, path: Path) -> Cohort:
        """The rows with their classes, as ``label``."""
        labels = read_table(path).numbers(self.config.label)
        rows = range(0, len(labels), self.config.every)
        return Cohort(tuple(map(str, rows)), {"label": labels[:: self.config.every]})

    def load(self, data: SiteData, seed: int) -> Examples:
        """The rows of a site, tokenised once; 20 % are for testing."""
        if self.config.base is None:
            raise ConfigError("task.base: missing; text needs the tokenizer that comes with a pre-trained encoder")
        table = read_table(data.path)
        texts, labels = table.column(self.config.text), table.numbers(self.config.label)
        ids = self.cohort(data.path).ids if data.subset is None else data.subset
        if unknown := [name for name in ids if not name.isdecimal() or int(name) >= len(labels)]:
            raise DataError(f"{data.path}: there is no row {unknown[0]!r}; it has 0 to {len(labels) - 1}")
        rows = np.array([int(name) for name in ids], dtype=np.int64)
        wrong = rows[~np.isin(labels[rows], np.arange(self.config.classes))]
        if len(wrong):
            raise DataError(
                f"{data.path}: row {wrong[0]} is of class {labels[wrong[0]]:g}; expected 0 to {self.config.classes - 1}. "
                "Set task.classes to the number of classes"
            )
        train, test = train_test(ids, seed)
        return Examples(self._rows(texts, labels, train), self._rows(texts, labels, test))

    def _rows(self, texts: np.ndarray, labels: np.ndarray, ids: tuple[str, ...]) -> TensorDataset:
        assert self.config.base is not None
        rows = [int(name) for name in ids]
        read, attended = tokens(
            base_folder(self.config.base), [str(texts[row]) for row in rows], self.config.max_length
        )
        return TensorDataset(read, attended, torch.from_numpy(labels[rows].astype(np.int64)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(_logits(model, batch), batch[2])

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (B, classes) and true classes (B,)."""
        return _logits(model, batch), batch[2]

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Accuracy and mean cross-entropy."""
        right = (predictions.argmax(dim=1) == targets).double().mean().item()
        return {"accuracy": right, "cross_entropy": functional.cross_entropy(predictions, targets).item()}


def _logits(model: nn.Module, batch: Any) -> Tensor:
    """Padding that the whole batch has is cut off first."""
    read, attended = batch[0], batch[1]
    longest = int(attended.sum(1).max())
    logits: Tensor = model(read[:, :longest], attended[:, :longest])
    return logits
