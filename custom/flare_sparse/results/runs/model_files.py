"""Models and their live entries as safetensors files (docs/model-files.md)."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ...core.checkpoint.writing import replace_atomically
from ...core.errors import ConfigError, WireError
from ...core.exchange import Patch
from ...core.mask import Mask
from ...core.params import Layout, compute_digest
from ...core.seeds import make_generator
from ...training import Site
from ...wire.encodings import ENCODINGS, choose_encoding
from ...wire.formats import FORMATS, ValueType
from ...wire.number_format import Coding

FORMAT = "flare-sparse model 1"
"""Format and version in the metadata of a file with the live entries alone."""
SITE_MODELS = "site_models"
"""Folder of the sites' own models, in the result folder of a run on one machine."""
_EXACT: tuple[ValueType, ...] = ("float32", "float32_zstd")
"""Formats of the values that lose nothing; a file has the shorter one."""


def save_model(
    path: Path, layout: Layout, weights: Tensor, live: Mask | None = None, values: ValueType | None = None
) -> None:
    """Write the vector ``weights`` ``(P,)`` and which of its entries are live; :func:`read_model` reads it back.

    A model whose entries are all live is written as named float32 tensors, any other by its live entries.

    Args:
        path: file to write.
        layout: layout of the model.
        weights: ``(P,)``.
        live: live entries; None: those that are not zero, if these are at most half of all.
        values: number format of the values; None: the shortest exact one.
    """
    live = _find_nonzero(weights) if live is None else live
    metadata = {"layout": layout.fingerprint, "sha256": compute_digest(weights)}
    if live.is_full and values is None:
        _write(path, layout.unflatten(weights), metadata)
        return
    # By their bits: -0.0 is not the zero that a reader puts in the place of an entry that is off.
    stored = live if not weights.view(torch.int32)[~live.bits].any() else Mask.full(layout.size)
    patch, sections = Patch.from_vector(weights, stored), {}
    for name in _EXACT if values is None else (values,):
        coding = Coding(layout, generator=make_generator(0, "model file"))
        sections[name] = FORMATS[name].seal(patch, coding).section
    name = min(sections, key=lambda name: sections[name].size)
    if values is not None:
        rounded = FORMATS[name].open(sections[name], stored, layout, None)
        metadata["sha256"] = compute_digest(Patch(rounded, stored).to_vector())
    _write_live(path, layout, live, sections[name], {**metadata, "values": name, "scalars": str(stored.count)})


def read_model(path: Path, layout: Layout) -> Tensor:
    """Read the vector ``(P,)`` from a file of :func:`save_model`.

    Raises:
        ConfigError: the file is missing or damaged, was not written by :func:`save_model`, or belongs to another
            network. No number in the file decides how much memory is taken before it has been checked.
    """
    with _open(path, layout) as file:
        metadata = file.metadata()
        if "format" in metadata:
            weights = _read_live_values(path, file, layout)
        else:
            _check_tensors(path, file, {spec.name: ("F32", spec.shape) for spec in layout.tensors})
            weights = layout.flatten({spec.name: file.get_tensor(spec.name) for spec in layout.tensors})
    _check_digest(path, "values", compute_digest(weights), metadata.get("sha256"))
    return weights


def read_mask(path: Path, layout: Layout) -> Mask:
    """Read the live entries from a file of :func:`save_model`.

    Raises:
        ConfigError: as :func:`read_model`.
    """
    with _open(path, layout) as file:
        return _read_selection(path, file, layout) if "format" in file.metadata() else Mask.full(layout.size)


def describe_model(layout: Layout, live: Mask) -> dict[str, Any]:
    """Return the numbers of parameters, live ones and both by tensor of two or more dimensions, for the summary."""
    bits = layout.unflatten(live.bits)
    layers = {spec.name: [int(bits[spec.name].sum()), spec.size] for spec in layout.tensors if len(spec.shape) > 1}
    return {
        "parameters": layout.num_parameters,
        "live": int(live.bits[: layout.num_parameters].sum()),
        "layers": layers,
    }


def save_site_model(folder: Path, site: Site) -> None:
    """Write a site's own model, the one that it evaluated last, below ``folder``.

    Only for runs whose sites are on one machine: elsewhere a site's own model never leaves the site.
    """
    if site.evaluated is not None:
        (folder / SITE_MODELS).mkdir(parents=True, exist_ok=True)
        save_model(folder / SITE_MODELS / f"{site.name}.safetensors", *site.evaluated)


def find_site_models(run: Path) -> dict[str, Path]:
    """Return the files of the sites' own models in a result folder, by site."""
    return {file.stem: file for file in sorted((run / SITE_MODELS).glob("*.safetensors"))}


def delete_models(folder: Path) -> None:
    """Delete the models of an earlier run, so that they are not mixed with those of the next run."""
    shutil.rmtree(folder / SITE_MODELS, ignore_errors=True)
    for name in ("model.safetensors", "best_model.safetensors"):
        (folder / name).unlink(missing_ok=True)


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


def _find_nonzero(weights: Tensor) -> Mask:
    """Return the entries that are not zero if they are at most half of all, and finite; else all."""
    bits = weights.view(torch.int32) != 0
    is_sparse = 2 * int(bits.sum()) <= bits.numel() and bool(weights.isfinite().all())
    return Mask(bits) if is_sparse else Mask.full(bits.numel())


def _write_live(path: Path, layout: Layout, live: Mask, values: np.ndarray, metadata: Mapping[str, str]) -> None:
    encoding, selection = choose_encoding(live, None, layout)
    # Copied: torch shares no memory that it may not write to.
    parts = {"selection": np.frombuffer(selection, np.uint8), "values": values}
    sections = {name: torch.from_numpy(part.copy()) for name, part in parts.items()}
    _write(path, sections, {**metadata, "format": FORMAT, "selection": encoding.name, "live": live.fingerprint})


@contextmanager
def _open(path: Path, layout: Layout) -> Iterator[Any]:
    """Yield an open file of this module, of the network with this layout; safetensors reads its header alone.

    Raises:
        ConfigError: as :func:`read_model`.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format", FORMAT) != FORMAT:
                raise ConfigError(
                    f"{path}: expected the format {FORMAT!r}, found {metadata['format']!r}, which another version of "
                    "flare-sparse wrote; read it with that version"
                )
            if metadata.get("layout") != layout.fingerprint:
                raise ConfigError(
                    f"{path}: belongs to another network: its layout is {metadata.get('layout')}, expected "
                    f"{layout.fingerprint}. The configuration, the package's version or the base model under the "
                    "adapters differs from that of the run, or flare-sparse run did not write the file"
                )
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read as a model of a run: {error}") from error
    except WireError as error:
        raise ConfigError(f"{path}: damaged: {error}; take it from a copy") from error


def _check_digest(path: Path, part: str, found: str, expected: object) -> None:
    if found != expected:
        raise ConfigError(
            f"{path}: damaged: the digest of its {part} is {found}, expected {expected}, which its header states; it "
            "was changed after it was written: take it from a copy"
        )


def _check_tensors(path: Path, file: Any, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Compare names, types and shapes in the header of a file with the expected ones.

    Raises:
        ConfigError: they differ.
    """
    # safe_open returns no mapping: its names must be listed with keys().
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    if different := sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)):
        name = different[0]
        raise ConfigError(f"{path}: tensor {name!r}: expected {expected.get(name)}, found {found.get(name)}")


def _read_bytes(path: Path, file: Any, name: str) -> Tensor:
    """Return one of the two tensors of a file with live entries, uint8 ``(n,)``; the file's length bounds n."""
    parts = {part: file.get_slice(part).get_shape() for part in file.keys()}  # noqa: SIM118
    sizes = {part: ("U8", (shape[0] if len(shape) == 1 else -1,)) for part, shape in parts.items()}
    _check_tensors(path, file, {part: sizes.get(part, ("U8", (-1,))) for part in ("selection", "values")})
    data: Tensor = file.get_tensor(name)
    return data


def _read_selection(path: Path, file: Any, layout: Layout) -> Mask:
    name = file.metadata().get("selection")
    if name not in ENCODINGS or ENCODINGS[name].requires_base:
        raise ConfigError(f"{path}: selection: expected an encoding without base, found {name!r}")
    live = ENCODINGS[name].decode(_read_bytes(path, file, "selection").numpy(), None, layout)
    _check_digest(path, "live entries", live.fingerprint, file.metadata().get("live"))
    return live


def _read_live_values(path: Path, file: Any, layout: Layout) -> Tensor:
    metadata, live = file.metadata(), _read_selection(path, file, layout)
    name, scalars = metadata.get("values"), metadata.get("scalars")
    if name not in FORMATS:
        raise ConfigError(f"{path}: values: expected one of {', '.join(FORMATS)}, found {name!r}")
    if scalars not in (str(live.count), str(layout.size)):
        raise ConfigError(f"{path}: scalars: expected {live.count} or {layout.size}, found {scalars!r}")
    stored = live if scalars == str(live.count) else Mask.full(layout.size)
    section = _read_bytes(path, file, "values").numpy()
    if (expected := FORMATS[name].measure(section, stored.count, layout)) != section.size:
        raise ConfigError(f"{path}: values: expected {expected} bytes, found {section.size}")
    return Patch(FORMATS[name].open(section, stored, layout, None), stored).to_vector()
