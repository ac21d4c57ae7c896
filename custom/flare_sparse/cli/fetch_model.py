"""``flare-sparse fetch-model``: download a base model from the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import ConfigError
from .console import out as console

_FILES = ["config.json", "model.safetensors", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json"]
"""Files to download: no pickles and no code."""


def fetch_model(
    repository: Annotated[
        str,
        typer.Argument(
            help="Repository on the hub, such as sentence-transformers/all-MiniLM-L6-v2", show_default=False
        ),
    ],
    revision: Annotated[str, typer.Option(help="Commit or tag; server and sites need the same one")] = "main",
    name: Annotated[str | None, typer.Option(help="Folder to write; default: the repository's name")] = None,
) -> None:
    """Download a base model into $FLARE_SPARSE_MODELS, where tasks find it by the folder's name.

    Jobs never download anything: run this once at the server and at each site, or copy the folder.

    [dim]flare-sparse fetch-model sentence-transformers/all-MiniLM-L6-v2 --revision main[/]
    """
    from ..tasks.models.base import MODELS_VARIABLE

    models = os.environ.get(MODELS_VARIABLE)
    if not models:
        raise ConfigError(f"${MODELS_VARIABLE} is not set; set it to the folder for base models")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError("fetch-model needs huggingface_hub: pip install 'flare-sparse[lora]'") from error
    folder = Path(models).expanduser() / (name or repository.rpartition("/")[2])
    try:
        snapshot_download(repository, revision=revision, local_dir=folder, allow_patterns=_FILES)
    # The hub's own errors are OSErrors.
    except (OSError, ValueError) as error:
        raise ConfigError(f"{repository} at {revision} cannot be downloaded: {error}") from error
    console.print(f"{folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())), markup=False)
