"""Models and masks as safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..checkpoint.writing import replace_atomically
from ..errors import ConfigError
from ..exchange import EncryptedValues
from ..mask import Mask
from ..params import Layout, compute_digest

ENCRYPTED = "encrypted_"
"""What the name of a model's file begins with when nobody without the key can read it."""


def save_model(path: Path, layout: Layout, weights: Tensor) -> None:
    """Named float32 tensors; ``load_model`` and ``safetensors`` read them back."""
    _write(path, layout.unflatten(weights), {"layout": layout.fingerprint, "sha256": compute_digest(weights)})


def save_mask(path: Path, layout: Layout, mask: Mask) -> None:
    """Named bool tensors: what lives."""
    _write(path, layout.unflatten(mask.bits), {"layout": layout.fingerprint, "fingerprint": mask.fingerprint})


def read_model(path: Path, layout: Layout) -> Tensor:
    """The vector ``(P,)`` in a file of :func:`save_model`.

    Raises:
        ConfigError: there is no such file, it is none of ours, or it is of another network.
    """
    return layout.flatten(_load(path, layout, torch.float32))


def load_mask(path: Path, layout: Layout) -> Mask:
    """The mask in a file of :func:`save_mask`.

    Raises:
        ConfigError: as :func:`load_model`.
    """
    return Mask(layout.flatten(_load(path, layout, torch.bool)))


def save_encrypted(path: Path, layout: Layout, sealed: EncryptedValues) -> None:
    """The encrypted values of a model; :func:`load_encrypted` reads them back."""
    _write(path, {"values": sealed.data}, {"layout": layout.fingerprint})


def load_encrypted(path: Path, layout: Layout) -> EncryptedValues:
    """The encrypted values in a file of :func:`save_encrypted`.

    Raises:
        ConfigError: there is no such file, it is none of ours, or it is of another network.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            of, data = (file.metadata() or {}).get("layout"), file.get_tensor("values")
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read as an encrypted model of a run: {error}") from error
    if of != layout.fingerprint or data.dtype != torch.uint8 or data.dim() != 1:
        raise ConfigError(f"{path}: holds another network: its layout is {of}, expected {layout.fingerprint}")
    return EncryptedValues(data)


def delete_models(folder: Path) -> None:
    """Forget an earlier run's models, readable or not, before those of a new one come: the two must not be mixed up."""
    for name in ("model.safetensors", "best_model.safetensors"):
        (folder / name).unlink(missing_ok=True)
        (folder / f"{ENCRYPTED}{name}").unlink(missing_ok=True)


def _write(path: Path, tensors: Mapping[str, Tensor], said: dict[str, str]) -> None:
    """Whole and on the disk, or not at all."""
    with replace_atomically(path) as part:
        safetensors.torch.save_file({n: tensor.contiguous() for n, tensor in tensors.items()}, part, metadata=said)


def _load(path: Path, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            of = (file.metadata() or {}).get("layout")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (OSError, safetensors.SafetensorError) as error:
        if (path.parent / f"{ENCRYPTED}{path.name}").is_file():
            raise ConfigError(
                f"{path}: the run's model is encrypted; at a site: flare-sparse decrypt {path.parent} --context FILE"
            ) from error
        raise ConfigError(f"{path}: cannot be read as a model or mask of a run: {error}") from error
    shapes = {entry.name: entry.shape for entry in layout.tensors}
    if of != layout.fingerprint or {n: tuple(t.shape) for n, t in tensors.items()} != shapes:
        raise ConfigError(
            f"{path}: holds another network: its layout is {of}, expected {layout.fingerprint}. The configuration, the "
            "package's version or the base under the adapters is not that of the run"
        )
    if any(tensor.dtype != dtype for tensor in tensors.values()):
        raise ConfigError(f"{path}: expected tensors of {dtype}")
    return tensors
