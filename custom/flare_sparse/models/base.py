"""Pre-trained weights under adapters: folders by name in a place that the site chooses.

A job names a base and never says where it lies, so it cannot make a site open files of the job's choice. All ends must
hold the same base: its digest is part of the layout's fingerprint, which every message carries.
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

from ..errors import ConfigError, suggest

MODELS_VARIABLE = "FLARE_SPARSE_MODELS"
WEIGHTS = "model.safetensors"

BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""A folder's name: no path."""


def base_folder(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of a base, ``$FLARE_SPARSE_MODELS/<name>``.

    Raises:
        ConfigError: the variable is not set, or there is no such folder.
    """
    place = environment.get(MODELS_VARIABLE)
    if not place:
        raise ConfigError(
            f"task.base: {name!r} is a folder in ${MODELS_VARIABLE}, which is not set here; set it to the folder that "
            "holds your pre-trained models (docs/lora.md)"
        )
    folder = Path(place).expanduser() / name
    if not folder.is_dir():
        there = [path.name for path in Path(place).expanduser().glob("*") if path.is_dir()]
        raise ConfigError(
            f"task.base: no folder {name!r} in ${MODELS_VARIABLE} ({place}).{suggest(name, there)} It holds: "
            f"{', '.join(sorted(there)) or 'nothing'}. flare-sparse fetch-model and flare-sparse save write such folders"
        )
    return folder


def load_base(network: nn.Module, folder: Path) -> None:
    """Read the weights of a network, as ``flare-sparse save`` wrote them, in place.

    Raises:
        ConfigError: the file is missing, malformed, or of another network.
    """
    file = folder / WEIGHTS
    try:
        tensors = safetensors.torch.load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"task.base: {file} cannot be read: {error}") from error
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items() if value.is_floating_point()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    wrong = sorted(set(wanted.items()) ^ set(found.items()))
    if wrong:
        name, shape = wrong[0]
        raise ConfigError(
            f"task.base: {file} is of another network: {name} {list(shape)} is only in "
            f"{'the file' if name in found and found[name] == shape else 'the network'}; give task.model the settings "
            "that the base was trained with"
        )
    network.load_state_dict(tensors, strict=False)


@contextmanager
def drawn(seed: int) -> Iterator[None]:
    """Torch's global generator starts at ``seed`` inside and goes on as before after: the same base at every end."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
