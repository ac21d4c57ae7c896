"""Pre-trained base models, by name, in a folder that each site chooses.

A job gives the name of a base model and never a path, so it cannot make a site open files of the job's choice. All
endpoints must have the same base model: its digest is part of the layout's fingerprint, which every message carries.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import safetensors.torch
import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import nn

from ...core.errors import ConfigError, suggest

MODELS_VARIABLE = "FLARE_SPARSE_MODELS"
WEIGHTS = "model.safetensors"

BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Name of a folder, not a path."""


def find_base_folder(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of a base model, ``$FLARE_SPARSE_MODELS/<name>``.

    Raises:
        ConfigError: the variable is not set, or the folder does not exist.
    """
    root = environment.get(MODELS_VARIABLE)
    if not root:
        raise ConfigError(
            f"task.base: {name!r} is a folder in ${MODELS_VARIABLE}, which is not set here; set it to the folder that "
            "holds your pre-trained models (docs/lora.md)"
        )
    folder = Path(root).expanduser() / name
    if not folder.is_dir():
        available = [path.name for path in Path(root).expanduser().glob("*") if path.is_dir()]
        raise ConfigError(
            f"task.base: no folder {name!r} in ${MODELS_VARIABLE} ({root}).{suggest(name, available)} It holds: "
            f"{', '.join(sorted(available)) or 'nothing'}. flare-sparse fetch-model and flare-sparse save write such "
            "folders"
        )
    return folder


def load_base(network: nn.Module, folder: Path) -> None:
    """Load weights that ``flare-sparse save`` wrote into a network, in place.

    Raises:
        ConfigError: the file is missing, malformed, or belongs to another network.
    """
    file = folder / WEIGHTS
    try:
        tensors = safetensors.torch.load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"task.base: {file} cannot be read: {error}") from error
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items() if value.is_floating_point()}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    differences = sorted(set(expected.items()) ^ set(shapes.items()))
    if differences:
        name, shape = differences[0]
        owner = "the file" if name in shapes and shapes[name] == shape else "the network"
        raise ConfigError(
            f"task.base: {file} belongs to another network: {name} {list(shape)} is only in "
            f"{owner}; give task.model the settings that the base model was trained with"
        )
    network.load_state_dict(tensors, strict=False)


@contextmanager
def seed_initialization(seed: int) -> Iterator[None]:
    """Seed torch's global generators within the context and restore them on exit.

    A base model that is drawn at random is then the same at every endpoint.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
