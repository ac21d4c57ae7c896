"""Models and masks as safetensors files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ...core.checkpoint.writing import replace_atomically
from ...core.errors import ConfigError
from ...core.exchange import EncryptedValues
from ...core.mask import Mask
from ...core.params import Layout, compute_digest
from ...training import Site

ENCRYPTED = "encrypted_"
"""Prefix of the file name of an encrypted model."""
SITE_MODELS = "site_models"
"""Folder of the sites' own models, in the result folder of a run on one machine."""


def save_model(path: Path, layout: Layout, weights: Tensor) -> None:
    """Write the vector ``weights`` ``(P,)`` as named float32 tensors; :func:`read_model` reads it back."""
    _write(path, layout.unflatten(weights), {"layout": layout.fingerprint, "sha256": compute_digest(weights)})


def save_mask(path: Path, layout: Layout, mask: Mask) -> None:
    """Write a mask as named bool tensors, True for live entries; :func:`read_mask` reads it back."""
    _write(path, layout.unflatten(mask.bits), {"layout": layout.fingerprint, "fingerprint": mask.fingerprint})


def read_model(path: Path, layout: Layout) -> Tensor:
    """Read the vector ``(P,)`` from a file of :func:`save_model`.

    Raises:
        ConfigError: the file is missing, was not written by :func:`save_model`, or belongs to another network.
    """
    return layout.flatten(_read(path, layout, torch.float32))


def read_mask(path: Path, layout: Layout) -> Mask:
    """Read the mask from a file of :func:`save_mask`.

    Raises:
        ConfigError: as :func:`read_model`.
    """
    return Mask(layout.flatten(_read(path, layout, torch.bool)))


def save_encrypted(path: Path, layout: Layout, values: EncryptedValues) -> None:
    """Write the encrypted values of a model; :func:`read_encrypted` reads them back."""
    _write(path, {"values": values.data}, {"layout": layout.fingerprint})


def read_encrypted(path: Path, layout: Layout) -> EncryptedValues:
    """Read the encrypted values from a file of :func:`save_encrypted`.

    Raises:
        ConfigError: the file is missing, was not written by :func:`save_encrypted`, or belongs to another network.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            fingerprint, data = (file.metadata() or {}).get("layout"), file.get_tensor("values")
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read as an encrypted model of a run: {error}") from error
    if fingerprint != layout.fingerprint or data.dtype != torch.uint8 or data.dim() != 1:
        raise ConfigError(
            f"{path}: belongs to another network: its layout is {fingerprint}, expected {layout.fingerprint}"
        )
    return EncryptedValues(data)


def save_site_model(folder: Path, site: Site) -> None:
    """Write a site's own model, the one that it evaluated last, below ``folder``.

    Only for runs whose sites are on one machine: elsewhere a site's own model never leaves the site.
    """
    if site.evaluated is not None:
        (folder / SITE_MODELS).mkdir(parents=True, exist_ok=True)
        save_model(folder / SITE_MODELS / f"{site.name}.safetensors", *site.evaluated)


def list_site_models(run: Path) -> dict[str, Path]:
    """Return the files of the sites' own models in a result folder, by site."""
    return {file.stem: file for file in sorted((run / SITE_MODELS).glob("*.safetensors"))}


def delete_models(folder: Path) -> None:
    """Delete the models of an earlier run, encrypted or not, so that they are not mixed with those of the next run."""
    shutil.rmtree(folder / SITE_MODELS, ignore_errors=True)
    for name in ("model.safetensors", "best_model.safetensors"):
        (folder / name).unlink(missing_ok=True)
        (folder / f"{ENCRYPTED}{name}").unlink(missing_ok=True)


def replace_record(record: Path, out: Path) -> None:
    """Copy a record into a result folder, without the models of an earlier run there."""
    delete_models(out)
    for file in sorted(record.iterdir()):
        # Replaced and not written in place: a reader of a growing file sees it whole at every moment.
        with replace_atomically(out / file.name) as part:
            shutil.copy2(file, part)


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically: the complete file reaches the disk, or none. Equal models, equal bytes."""
    with replace_atomically(path) as part:
        safetensors.torch.save_file({n: tensor.contiguous() for n, tensor in tensors.items()}, part, metadata=metadata)
        _sort_metadata(part)


def _sort_metadata(path: Path) -> None:
    """Put the metadata in the order of their names; safetensors writes them in another order each time."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        # The order changes no length; the end is filled with spaces, as safetensors does.
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(size))


def _read(path: Path, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the named tensors of a file and check them against the layout."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            fingerprint = (file.metadata() or {}).get("layout")
            # safe_open returns no mapping: its names must be listed with keys().
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        if (path.parent / f"{ENCRYPTED}{path.name}").is_file():
            raise ConfigError(
                f"{path}: the run's model is encrypted; decrypt it at a site: flare-sparse save {path.parent} "
                "--context FILE"
            ) from error
        raise ConfigError(f"{path}: cannot be read as a model or mask of a run: {error}") from error
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    if fingerprint != layout.fingerprint or {n: tuple(t.shape) for n, t in tensors.items()} != shapes:
        raise ConfigError(
            f"{path}: belongs to another network: its layout is {fingerprint}, expected {layout.fingerprint}. The "
            "configuration, the package's version or the base model under the adapters differs from that of the run"
        )
    if any(tensor.dtype != dtype for tensor in tensors.values()):
        raise ConfigError(f"{path}: expected tensors of {dtype}")
    return tensors
