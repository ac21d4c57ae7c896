"""Conversion of dataclasses to JSON with named tensors, and back by declared types.

A file names no class, so loading it cannot run foreign code, as pickle could.
"""

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
    """Return ``value`` as JSON in which each tensor is replaced by its name in ``tensors``.

    Args:
        value: dataclasses, mappings, sequences, tensors, masks and plain values.
        tensors: receives each tensor object once.

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
            return self._assign_name(value.bits)
        if isinstance(value, Tensor):
            return self._assign_name(value)
        if isinstance(value, Mapping):
            return {str(key): self.pack(part) for key, part in value.items()}
        if isinstance(value, Sequence):
            return [self.pack(part) for part in value]
        if dataclasses.is_dataclass(value):
            return {field.name: self.pack(getattr(value, field.name)) for field in dataclasses.fields(value)}
        raise CheckpointError(
            f"{type(value).__name__} cannot be kept in a checkpoint; use tensors, masks and plain values"
        )

    def _assign_name(self, tensor: Tensor) -> str:
        # One name per object and not per value: the mask that sixty sites share is written once.
        name = self._names.setdefault(id(tensor), str(len(self._names)))
        self._tensors.setdefault(name, tensor)
        return name


def unpack(packed: Any, kind: Any, tensors: Mapping[str, Tensor], path: str = "content") -> Any:
    """Return the value that :func:`pack` received, of type ``kind``.

    Args:
        packed: JSON.
        kind: a dataclass, ``Tensor``, ``Mask``, a plain type, ``tuple[X, ...]``, ``list[X]``, ``dict[str, X]``, or the
            union of one of these with None.
        tensors: by name.
        path: path of the value, for error messages.

    Raises:
        CheckpointError: the value is not of the declared type.
    """
    try:
        return _unpack(packed, kind, tensors, path)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: expected {_get_name(kind)}: {error!r}") from error


def _unpack(packed: Any, kind: Any, tensors: Mapping[str, Tensor], path: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _unpack_optional(packed, get_args(kind), tensors, path)
    if origin in (tuple, list, dict):
        return _unpack_collection(packed, origin, get_args(kind), tensors, path)
    if dataclasses.is_dataclass(origin or kind):
        return _unpack_dataclass(packed, kind, tensors, path)
    if kind is Mask:
        return Mask(tensors[_check_type(str, packed)])
    return tensors[_check_type(str, packed)] if kind is Tensor else _check_type(kind, packed)


def _unpack_collection(
    packed: Any, origin: Any, parts: tuple[Any, ...], tensors: Mapping[str, Tensor], path: str
) -> Any:
    """Unpack ``tuple[X, ...]``, ``list[X]`` or ``dict[str, X]``."""
    if origin is dict:
        return {
            name: unpack(part, parts[1], tensors, f"{path}.{name}") for name, part in _check_type(dict, packed).items()
        }
    return origin(unpack(part, parts[0], tensors, f"{path}.{i}") for i, part in enumerate(_check_type(list, packed)))


def _unpack_optional(packed: Any, parts: tuple[Any, ...], tensors: Mapping[str, Tensor], path: str) -> Any:
    """Unpack ``X | None``, the only union: with more types, the file would have to name one."""
    if packed is None and type(None) in parts:
        return None
    (kind,) = (part for part in parts if part is not type(None))
    return _unpack(packed, kind, tensors, path)


def _unpack_dataclass(packed: Any, kind: Any, tensors: Mapping[str, Tensor], path: str) -> Any:
    """Unpack a dataclass, also a generic one with type arguments, such as ``Snapshot[State]``."""
    cls = get_origin(kind) or kind
    arguments = dict(zip(getattr(cls, "__parameters__", ()), get_args(kind), strict=True))
    hints = get_type_hints(cls)
    names = sorted(field.name for field in dataclasses.fields(cls))
    if sorted(_check_type(dict, packed)) != names:
        raise CheckpointError(f"{path}: {cls.__name__} has {names}, found {sorted(packed)}")
    parts = {name: arguments.get(hints[name], hints[name]) for name in names}
    return cls(**{name: unpack(packed[name], part, tensors, f"{path}.{name}") for name, part in parts.items()})


def _check_type(kind: Any, packed: Any) -> Any:
    """Return ``packed`` if it is of type ``kind``; an int is accepted as a float."""
    # Literal[...] is not checked here.
    if kind is Any or get_origin(kind) is not None:
        return packed
    if kind is float and type(packed) is int:
        return float(packed)
    if type(packed) is not kind:
        raise TypeError(f"found {type(packed).__name__}")
    return packed


def _get_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
