"""Pre-trained base models, by name, in a folder that each site chooses.

A base model is what ``flare-sparse save`` writes, or weights of another training: a bundle of MONAI, a file of torch or
safetensors. A job names the tensors of its network that start anew, such as a head.

A job gives the name of a base model and never a path, so it cannot make a site open files of the job's choice. All
endpoints must have the same base model: its digest is part of the layout's fingerprint, which every message carries.
"""

import os
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import product, takewhile
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ...core.errors import ConfigError, list_first, suggest
from ...core.settings import Settings

MODELS_VARIABLE = "FLARE_SPARSE_MODELS"
WEIGHTS = "model.safetensors"
FILES = (WEIGHTS, "models/model.safetensors", "models/model.pt", "model.pt")
"""Where weights are, in this order: of ``flare-sparse save``, of bundles of MONAI, others."""

BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Name of a folder, not a path."""


class Base(Settings):
    """Weights that a network starts from; the name of a folder stands for one without further settings."""

    folder: BaseName
    """name of a folder in $FLARE_SPARSE_MODELS, not a path"""
    file: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*\.(safetensors|pt|pth|ckpt)$"
    )
    """file in the folder, ending in .safetensors, .pt, .pth or .ckpt; null: model.safetensors, model.pt or
    models/model.pt"""
    new: tuple[str, ...] = ()
    """patterns of tensors of the network that start anew, such as out.*, and are trained also beside adapters; all
    others must be there"""

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        return {"folder": value} if isinstance(value, str) else value

    def list_new(self, names: Iterable[str]) -> list[str]:
        """Return the names of tensors that start anew, in order."""
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.new)]


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
            f"{', '.join(sorted(available)) or 'nothing'}. flare-sparse save and hf download write such "
            "folders"
        )
    return folder


def load_base(network: nn.Module, folder: Path, base: Base) -> str:
    """Load the tensors of a file into a network, in place, and return what matched, as one line.

    Names of the file may have a prefix that those of the network lack, such as ``module.`` or ``net.``, or lack one.
    Files of torch are read without running code.

    Raises:
        ConfigError: the file is missing or malformed, a tensor of the network is neither in it nor named as new, or a
            pattern matches no tensor.
    """
    files = (base.file,) if base.file else FILES
    file = next((folder / name for name in files if (folder / name).is_file()), None)
    if file is None:
        raise ConfigError(f"task.base: {folder} has no {' or '.join(files)}; name the file as task.base.file")
    tensors, own = _read_tensors(file), network.state_dict()
    expected = {name: tuple(value.shape) for name, value in own.items() if value.is_floating_point()}
    for pattern in base.new:
        if not any(fnmatchcase(name, pattern) for name in expected):
            raise ConfigError(f"task.base.new: {pattern!r} matches no tensor of the network: {list_first(expected, 5)}")
    new = set(base.list_new(expected))
    wanted = {name: shape for name, shape in expected.items() if name not in new}
    # A whole file may be wrapped, as DataParallel does, and be a part of the network, too.
    files_names = (tensors, _strip_wrapper(tensors))
    matches = [_match_names(wanted, {name: tuple(value.shape) for name, value in part.items()}) for part in files_names]
    tensors, sources = max(zip(files_names, matches, strict=True), key=lambda pair: len(pair[1]))
    if missing := [name for name in wanted if name not in sources]:
        raise ConfigError(
            f"task.base: {len(missing)} of {len(wanted)} tensors are not in {file} with their shape: "
            f"{list_first(missing, 5)}; it has {list_first(tensors, 5)}. Give task.model the settings that the weights "
            "were trained with, or list what starts anew in task.base.new"
        )
    if not sources:
        raise ConfigError(f"task.base.new: no tensor is left that would be read from {file}")
    if bad := [name for name in sources.values() if not bool(torch.isfinite(tensors[name]).all())]:
        raise ConfigError(f"task.base: {file}: {bad[0]} has a value that is NaN or infinite")
    network.load_state_dict({name: tensors[source] for name, source in sources.items()}, strict=False)
    unused = [name for name in tensors if name not in sources.values()]
    report = f"{len(sources)} of {len(expected)} tensors are from {folder.name}/{file.relative_to(folder)}"
    report += f"; new: {list_first((n for n in expected if n not in sources), 5)}" if new else ""
    return report + (f"; not used: {list_first(unused, 5)}" if unused else "")


def _match_names(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the name in the file of each wanted tensor that is there with its shape.

    One prefix, which the names of the file have more or less than those of the network, applies to all of them: the
    one with which most tensors match, the shortest of several.
    """
    prefixes: Counter[tuple[str, str]] = Counter({("", ""): 0})
    for name, source in product(wanted, found):
        if wanted[name] == found[source] and f".{source}".endswith(f".{name}"):
            prefixes["", source.removesuffix(name)] += 1
        elif wanted[name] == found[source] and name.endswith(f".{source}"):
            prefixes[name.removesuffix(source), ""] += 1
    own, other = min(prefixes, key=lambda pair: (-prefixes[pair], len(pair[0]) + len(pair[1]), pair))
    sources = {name: other + name.removeprefix(own) for name in wanted if name.startswith(own)}
    return {name: source for name, source in sources.items() if found.get(source) == wanted[name]}


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; in a file of torch, those of the one state that it holds."""
    try:
        if file.suffix == ".safetensors":
            return _select_dense(safetensors.torch.load_file(file))
        content = torch.load(file, map_location="cpu", weights_only=True)
    # torch's own text proposes to run the code in the file.
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"task.base: {file} cannot be read: it is damaged, or holds objects other than tensors, which could run "
            "code. Save the network's state_dict alone, such as with safetensors"
        ) from error
    # The readers' errors in a damaged file are of many classes.
    except Exception as error:
        raise ConfigError(f"task.base: {file} cannot be read: {error}") from error
    states = _list_states(content)
    if len(states) != 1:
        raise ConfigError(f"task.base: {file} holds {len(states)} states of networks; expected one")
    return states[0]


def _select_dense(tensors: Mapping[Any, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of real numbers that a network can be loaded from."""
    return {
        str(name): value
        for name, value in tensors.items()
        if value.is_floating_point() and value.layout == torch.strided and not value.is_meta
    }


def _strip_wrapper(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the first parts of their names that are the same in all of them."""
    parts = {name: name.split(".") for name in tensors}
    columns = zip(*(path[:-1] for path in parts.values()), strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return {".".join(parts[name][shared:]): value for name, value in tensors.items()}


def _list_states(content: Any) -> list[dict[str, Tensor]]:
    """Return the dictionaries of tensors in a checkpoint, which may hold them beside other things."""
    if not isinstance(content, Mapping):
        return []
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if tensors and len(tensors) == len(content):
        return [_select_dense(tensors)]
    # An optimizer's state is a dictionary of dictionaries by number.
    return [state for name, value in content.items() if isinstance(name, str) for state in _list_states(value)]
