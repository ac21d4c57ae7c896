"""Classification of short texts, such as the 77 intents of BANKING77, with a pre-trained encoder."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ..core.errors import ConfigError, DataError
from ..core.needs import Needs
from ..core.seeds import seed_torch
from .adaptation import AdaptableTask, AdaptedTaskConfig
from .classes import check_class_weights, compute_cross_entropy, list_weight_needs
from .data.absence import find_absent_rows
from .data.tables import read_table
from .models.base import Base, find_base_folder
from .models.text import Architecture, build_text_classifier, tokenize
from .task import Cohort, Examples, Metric, SiteData, build_examples


class TextConfig(AdaptedTaskConfig):
    """Columns of the table, and the encoder; the defaults fit BANKING77."""

    architecture: Architecture = "minilm-l6"
    """architecture if base is null; for estimates only, because it has no tokenizer"""
    classes: int = Field(77, ge=2, le=10_000)
    """number of classes"""
    class_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """weight of an example in the loss, by class; empty: 1. Constants of the job, as [1, 4]"""
    max_length: int = Field(32, ge=4, le=512)
    """most tokens of a text; longer texts are truncated"""
    text: str = "text"
    """column of the texts"""
    label: str = "label"
    """column of the classes, whole numbers from 0"""
    every: int = Field(1, ge=1)
    """use only every n-th row of the table"""

    @field_validator("base")
    @classmethod
    def _check_base(cls, base: Base | None) -> Base | None:
        if base is not None and not base.has_only_name:
            raise ValueError("texts need a tokenizer; give the name of a folder of transformers")
        return base

    @model_validator(mode="after")
    def _check_class_weights(self) -> Self:
        check_class_weights(self.class_weights, self.classes)
        return self

    def needs(self) -> Needs:
        return list_weight_needs(self.class_weights)


class TextClassification(AdaptableTask):
    """Prediction of a text's class; batches are ``(tokens (B, L), attention mask (B, L), class (B,))``, all int64.

    A data set is a table with a column of texts and a column of classes. An example's identifier is its row number,
    from 0.
    """

    Config = TextConfig
    config: TextConfig
    metric = Metric("accuracy", "", "max")
    kind = "classes"
    reads = "a table (CSV, xlsx, Parquet, ...) with a column of texts and a column of classes, whole numbers from 0"

    def build_network(self) -> nn.Module:
        """Return the encoder with a new head; the encoder is pre-trained if ``base`` is set."""
        folder = find_base_folder(self.config.base.folder) if self.config.base else None
        return build_text_classifier(folder, self.config.architecture, self.config.classes)

    def build_base(self) -> nn.Module:
        """Return the pre-trained encoder with a head initialised from ``base_seed``."""
        with seed_torch(self.config.base_seed):
            return self.build_network()

    def describe_base(self) -> str:
        """Return nothing: transformers reads the encoder."""
        return ""

    def cohort(self, path: Path) -> Cohort:
        """Return the rows with their classes in the column ``label``."""
        labels = read_table(path).get_numbers(self.config.label)
        rows = range(0, len(labels), self.config.every)
        return Cohort(tuple(map(str, rows)), {"label": labels[:: self.config.every]})

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read and tokenise the rows of a site."""
        if self.config.base is None:
            raise ConfigError("task.base: missing; texts need the tokenizer of a pre-trained encoder")
        table = read_table(data.path)
        texts, labels = table.get_column(self.config.text), table.get_numbers(self.config.label)
        ids = self.select(data, self.cohort(data.path))
        if unknown := [name for name in ids if not name.isdecimal() or int(name) >= len(labels)]:
            raise DataError(f"{data.path}: there is no row {unknown[0]!r}; rows are 0 to {len(labels) - 1}")
        rows = np.array([int(name) for name in ids], dtype=np.int64)
        wrong = rows[~np.isin(labels[rows], np.arange(self.config.classes))]
        if len(wrong):
            raise DataError(
                f"{data.path}: row {wrong[0]} has class {labels[wrong[0]]:g}; expected 0 to {self.config.classes - 1}. "
                "Set task.classes to the number of classes"
            )
        return build_examples(self.config.split.assign(ids, seed), partial(self._build_dataset, texts, labels))

    def select(self, data: SiteData, cohort: Cohort) -> tuple[str, ...]:
        """Return the identifiers of the rows that a site may use."""
        absent = find_absent_rows(data, read_table(data.path)) if data.withdrawn else ()
        names = cohort.ids if data.subset is None else data.subset
        return tuple(name for name in names if not (name.isdecimal() and int(name) in absent))

    def _build_dataset(self, texts: np.ndarray, labels: np.ndarray, ids: Sequence[str]) -> TensorDataset:
        assert self.config.base is not None
        rows = [int(name) for name in ids]
        token_ids, attention_mask = tokenize(
            find_base_folder(self.config.base.folder), [str(texts[row]) for row in rows], self.config.max_length
        )
        return TensorDataset(token_ids, attention_mask, torch.from_numpy(labels[rows].astype(np.int64)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross-entropy, a scalar."""
        return compute_cross_entropy(_compute_logits(model, batch), batch[2], self.config.class_weights)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits ``(B, classes)`` and true classes ``(B,)``."""
        return _compute_logits(model, batch), batch[2]

    def tabulate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Raise NotImplementedError: token numbers are names, of which a linear model learns nothing."""
        raise NotImplementedError("texts have no linear baseline")

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return accuracy and mean cross-entropy."""
        accuracy = (predictions.argmax(dim=1) == targets).double().mean().item()
        return {"accuracy": accuracy, "cross_entropy": functional.cross_entropy(predictions, targets).item()}


def _compute_logits(model: nn.Module, batch: Any) -> Tensor:
    """Return the logits of a batch, computed without the padding that all its texts share."""
    token_ids, attention_mask = batch[0], batch[1]
    max_tokens = int(attention_mask.sum(1).max())
    logits: Tensor = model(token_ids[:, :max_tokens], attention_mask[:, :max_tokens])
    return logits
