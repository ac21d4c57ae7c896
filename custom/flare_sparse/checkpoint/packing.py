"""Values to JSON and named tensors, and back by declared types: a file names no class, so it can build none."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from ..errors import CheckpointError
from ..mask import Mask

_PLAIN = (bool, int, float, str)


def pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON; its tensors go to ``tensors``, each object once, and leave their name behind.

    Raises:
        CheckpointError: a type that no checkpoint may hold.
    """
    return _Packer(tensors).pack(value)


class _Packer:
    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors
        self._names: dict[int, str] = {}

    def pack(self, value: Any) -> Any:
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, Mask):
            return self._name(value.bits)
        if isinstance(value, Tensor):
            return self._name(value)
        if isinstance(value, Mapping):
            return {str(key): self.pack(part) for key, part in value.items()}
        if isinstance(value, Sequence):
            return [self.pack(part) for part in value]
        if dataclasses.is_dataclass(value):
            return {field.name: self.pack(getattr(value, field.name)) for field in dataclasses.fields(value)}
        raise CheckpointError(
            f"{type(value).__name__} cannot be kept in a checkpoint; use tensors, masks, plain values"
        )

    def _name(self, tensor: Tensor) -> str:
        """One name for one object: a mask that sixty sites hold is written once."""
        name = self._names.setdefault(id(tensor), str(len(self._names)))
        self._tensors.setdefault(name, tensor)
        return name


def unpack(packed: Any, kind: Any, tensors: Mapping[str, Tensor], where: str = "content") -> Any:
    """The value that :func:`pack` was given, as ``kind`` declares it.

    Args:
        packed: JSON.
        kind: a dataclass, ``Tensor``, ``Mask``, a plain type, ``tuple[X, ...]``, ``list[X]``, ``dict[str, X]``, or one
            of these or None.
        tensors: by name.
        where: path of the value, for messages.

    Raises:
        CheckpointError: what is there is not what is declared.
    """
    try:
        return _unpack(packed, kind, tensors, where)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where}: expected {_named(kind)}: {error!r}") from error


def _unpack(packed: Any, kind: Any, tensors: Mapping[str, Tensor], where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _either(packed, get_args(kind), tensors, where)
    if origin in (tuple, list, dict):
        return _collected(packed, origin, get_args(kind), tensors, where)
    if dataclasses.is_dataclass(origin or kind):
        return _built(packed, kind, tensors, where)
    if kind is Mask:
        return Mask(tensors[_of(str, packed)])
    return tensors[_of(str, packed)] if kind is Tensor else _of(kind, packed)


def _collected(packed: Any, origin: Any, parts: tuple[Any, ...], tensors: Mapping[str, Tensor], where: str) -> Any:
    """``tuple[X, ...]``, ``list[X]`` or ``dict[str, X]``."""
    if origin is dict:
        return {name: unpack(part, parts[1], tensors, f"{where}.{name}") for name, part in _of(dict, packed).items()}
    return origin(unpack(part, parts[0], tensors, f"{where}.{i}") for i, part in enumerate(_of(list, packed)))


def _either(packed: Any, parts: tuple[Any, ...], tensors: Mapping[str, Tensor], where: str) -> Any:
    """``X | None`` only: with more choices what is there would have to say which."""
    if packed is None and type(None) in parts:
        return None
    (kind,) = (part for part in parts if part is not type(None))
    return _unpack(packed, kind, tensors, where)


def _built(packed: Any, kind: Any, tensors: Mapping[str, Tensor], where: str) -> Any:
    """A dataclass, also one whose type variables are given, such as ``Snapshot[State]``."""
    made = get_origin(kind) or kind
    chosen = dict(zip(getattr(made, "__parameters__", ()), get_args(kind), strict=True))
    hints = get_type_hints(made)
    names = sorted(field.name for field in dataclasses.fields(made))
    if sorted(_of(dict, packed)) != names:
        raise CheckpointError(f"{where}: {made.__name__} has {names}, found {sorted(packed)}")
    parts = {name: chosen.get(hints[name], hints[name]) for name in names}
    return made(**{name: unpack(packed[name], part, tensors, f"{where}.{name}") for name, part in parts.items()})


def _of(kind: Any, packed: Any) -> Any:
    """``packed`` if it is of this type; a literal is what it is, an int serves as a float."""
    if kind is Any or get_origin(kind) is not None:  # Literal[...]
        return packed
    if kind is float and type(packed) is int:
        return float(packed)
    if type(packed) is not kind:
        raise TypeError(f"found {type(packed).__name__}")
    return packed


def _named(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
