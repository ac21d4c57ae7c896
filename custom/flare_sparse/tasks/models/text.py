"""Text classifiers: a transformers encoder, the mean over its token states, one linear layer."""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError

Architecture = Literal["minilm-l6", "roberta-base"]

_BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "minilm-l6": ("bert", {**_BERT, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}),
    "roberta-base": ("roberta", {**_BERT, "vocab_size": 50265, "max_position_embeddings": 514}),
}
assert set(_SHAPES) == set(get_args(Architecture))


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
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("text tasks need transformers; pip install 'flare-sparse[lora]'") from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
