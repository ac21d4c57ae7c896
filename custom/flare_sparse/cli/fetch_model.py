"""``flare-sparse fetch-model``: a pre-trained encoder from the Hugging Face hub into the folder of bases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..models.base import MODELS_VARIABLE
from .console import out as console

_FILES = ["config.json", "model.safetensors", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json"]
"""No pickles and no code."""


def fetch_model(
    repository: Annotated[str, typer.Argument(help="on the hub, such as sentence-transformers/all-MiniLM-L6-v2")],
    revision: Annotated[str, typer.Option(help="commit or tag; all ends of a federation need the same")] = "main",
    name: Annotated[str | None, typer.Option(help="folder to write; default: the repository's own name")] = None,
) -> None:
    """Download a pre-trained model into $FLARE_SPARSE_MODELS, where tasks find it by its folder's name.

    Jobs never download anything: each end does this once, or copies the folder.

    [dim]flare-sparse fetch-model sentence-transformers/all-MiniLM-L6-v2 --revision main[/]
    """
    place = os.environ.get(MODELS_VARIABLE)
    if not place:
        raise ConfigError(f"${MODELS_VARIABLE} is not set; set it to the folder that is to hold pre-trained models")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError("fetch-model needs huggingface_hub; pip install 'flare-sparse[lora]'") from error
    folder = Path(place).expanduser() / (name or repository.rpartition("/")[2])
    try:
        snapshot_download(repository, revision=revision, local_dir=folder, allow_patterns=_FILES)
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise ConfigError(f"{repository} at {revision} cannot be fetched: {error}") from error
    console.print(f"{folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())), markup=False)
