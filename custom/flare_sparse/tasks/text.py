"""Classification of short texts, such as the 77 intents of BANKING77: a transformers encoder, the mean over its token
states, one linear layer.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ..core.errors import ConfigError, DataError, require_extra
from ..core.seeds import seed_torch
from .adaptation import AdaptableTask, AdaptedTaskConfig
from .classes import ClassesConfig, compute_cross_entropy
from .data.absence import find_absent_rows
from .data.tables import read_table
from .models.base import Base, find_base_folder
from .task import Cohort, Examples, Metric, SiteData, build_examples

Architecture = Literal["minilm-l6", "roberta-base"]

_BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "minilm-l6": ("bert", {**_BERT, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}),
    "roberta-base": ("roberta", {**_BERT, "vocab_size": 50265, "max_position_embeddings": 514}),
}
assert set(_SHAPES) == set(get_args(Architecture))


class TextConfig(AdaptedTaskConfig, ClassesConfig):
    """Columns of the table, and the encoder; the defaults fit BANKING77."""

    architecture: Architecture = "minilm-l6"
    """architecture if base is null; for estimates only, because it has no tokenizer"""
    classes: int = Field(77, ge=2, le=10_000)
    """number of classes"""
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
        if base is not None and (base.file or base.new):
            raise ValueError("texts need a tokenizer; give the name of a folder of transformers")
        return base


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


class TextClassifier(nn.Module):
    """A classifier from tokens (B, L) to logits (B, classes)."""

    def __init__(self, encoder: nn.Module, hidden: int, classes: int):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor, attended: Tensor) -> Tensor:
        """Return the logits; the attention mask ``attended`` (B, L) is 1 for tokens and 0 for padding."""
        states = self.encoder(input_ids=tokens, attention_mask=attended).last_hidden_state
        weights = attended.unsqueeze(-1).to(states.dtype)
        mean: Tensor = (states * weights).sum(1) / weights.sum(1).clamp_min(1)
        logits: Tensor = self.head(mean)
        return logits


def build_text_classifier(folder: Path | None, architecture: Architecture, classes: int) -> TextClassifier:
    """Build a classifier with an encoder that is loaded from a folder, or drawn at random.

    The encoder's pooler is removed; the mean over token states replaces it.

    Args:
        folder: folder of the encoder in the format of transformers; None to draw the encoder at random.
        architecture: architecture of a random encoder.
        classes: number of classes.

    Raises:
        ConfigError: the folder holds no encoder, or transformers is not installed.
    """
    transformers = _import_transformers()
    if folder is None:
        kind, sizes = _SHAPES[architecture]
        encoder = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    else:
        encoder = _load_pretrained(folder, transformers.AutoModel, use_safetensors=True, dtype=torch.float32)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return TextClassifier(encoder, encoder.config.hidden_size, classes)


def tokenize(folder: Path, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
    """Tokenize texts with the tokenizer in an encoder's folder.

    Returns:
        Tokens and attention mask, int64 ``(n, length)`` each.

    Raises:
        ConfigError: the folder holds no tokenizer, or transformers is not installed.
    """
    tokenizer = _load_pretrained(folder, _import_transformers().AutoTokenizer)
    if not texts:
        return torch.zeros(0, length, dtype=torch.int64), torch.zeros(0, length, dtype=torch.int64)
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"]


def _load_pretrained(folder: Path, kind: Any, **settings: Any) -> Any:
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **settings)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"task.base: {folder} cannot be read by transformers: {error}. Expected config.json, model.safetensors and "
            "the tokenizer's files; hf download writes such folders"
        ) from error


def _import_transformers() -> Any:
    with require_extra("a text task", "lora"):
        import transformers
    transformers.utils.logging.disable_progress_bar()
    return transformers
