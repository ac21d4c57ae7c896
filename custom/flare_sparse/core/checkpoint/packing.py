"""Conversion of dataclasses to JSON with named tensors, and back by declared types.

A file names no class, so loading it cannot run foreign code, as pickle could. A mask takes one bit per entry; of a
large float32 tensor that is mostly zero, the other values and their positions are written. Where a mask of the same
content has these positions, they are written once.
"""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError, SelectionError
from ..mask import Mask

_PLAIN = (bool, int, float, str)
_COLLECTIONS: dict[Any, Any] = {tuple: tuple, list: list, dict: dict, Mapping: dict, Sequence: tuple}

_LARGE = 4096
"""Entries from which a tensor is examined for zeros."""


def pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON in which each tensor is replaced by its name in ``tensors``.

    Args:
        value: dataclasses, mappings, sequences, tensors, masks and plain values.
        tensors: receives each tensor object once.

    Raises:
        CheckpointError: a type that no checkpoint may hold.
    """
    packer = _Packer(tensors)
    packed = packer.pack(value)
    packer.pack_sparse_tensors()
    return packed


def check_state(state: Any, owner: str) -> None:
    """Check that a checkpoint can hold a state and give it back; no file is written.

    Args:
        state: a dataclass.
        owner: what has the state, for the message.

    Raises:
        CheckpointError: it cannot; the text names the field.
    """
    tensors: dict[str, Tensor] = {}
    try:
        if not dataclasses.is_dataclass(state):
            raise CheckpointError(f"found {type(state).__name__}")
        unpack(pack(state, tensors), type(state), tensors)
    # The declared types are the author's: a name among them may not exist.
    except (CheckpointError, NameError) as error:
        raise CheckpointError(
            f"{owner}: its state cannot be kept in a checkpoint: {error}; expected a frozen dataclass of tensors, "
            "masks, plain values, tuples, dictionaries by text, and such dataclasses"
        ) from error


class _Packer:
    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors
        # Packed at the end, when all masks are known: the tensor, the number of its live entries, and where they go.
        self._sparse: list[tuple[Tensor, int, dict[str, Any]]] = []
        # By the id of the packed object, which is held: a later object must not get the id of a deleted one.
        self._packed: dict[int, tuple[Any, Any]] = {}

    def pack(self, value: Any, path: str = "content") -> Any:
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, (Mask, Tensor)):
            # Write each object once: sixty sites may share one mask.
            if id(value) not in self._packed:
                self._packed[id(value)] = value, self._pack_entries(value)
            return self._packed[id(value)][1]
        if isinstance(value, Mapping):
            return {str(key): self.pack(part, f"{path}.{key}") for key, part in value.items()}
        if isinstance(value, Sequence):
            return [self.pack(part, path) for part in value]
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return {name: self.pack(part, f"{path}.{name}") for name, part in fields.items()}
        raise CheckpointError(
            f"{path}: {type(value).__name__} cannot be kept in a checkpoint; use tensors, masks and plain values"
        )

    def _pack_entries(self, value: Mask | Tensor) -> Any:
        if isinstance(value, Mask):
            return {"entries": value.size, "bits": self._add(_to_bytes(value.packed))}
        value = value.cpu()
        num_live = _count_live(value)
        if num_live is None:
            return self._add(value)
        packed: dict[str, Any] = {}
        self._sparse.append((value, num_live, packed))
        return packed

    def pack_sparse_tensors(self) -> None:
        """Write the tensors of which only some entries are written, with the bits of a mask that covers them."""
        for tensor, num_live, packed in self._sparse:
            bits, values = self._select_live(tensor.detach().reshape(-1), num_live)
            packed |= {"shape": list(tensor.shape), "bits": bits, "values": self._add(values)}

    def _select_live(self, flat: Tensor, num_live: int) -> tuple[str, Tensor]:
        """Return the name of the bits of the positions to write, and the values there."""
        for name, mask in self._find_covering_masks(flat.numel(), num_live):
            values = mask.take(flat)
            if _count_nonzero(values) == num_live:
                return name, values
        live = _view_bits(flat) != 0
        return self._add(_to_bytes(np.packbits(live).tobytes())), torch.from_numpy(flat.numpy()[live])

    def _find_covering_masks(self, size: int, num_live: int) -> list[tuple[str, Mask]]:
        """Return names of bits and masks that may select all live entries, the smallest first."""
        # A zero that such a mask selects is written: together no more bytes than bits of their own would take.
        most = num_live + size // 32
        masks = [
            (packed["bits"], value)
            for value, packed in self._packed.values()
            if isinstance(value, Mask) and value.size == size and num_live <= value.count <= most
        ]
        # Each trial reads the tensor at the mask's entries.
        return sorted(masks, key=lambda pair: pair[1].count)[:2]

    def _add(self, tensor: Tensor) -> str:
        name = str(len(self._tensors))
        self._tensors[name] = tensor
        return name


def _to_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _count_live(tensor: Tensor) -> int | None:
    """Return how many entries differ from 0.0; None where it does not pay to write only those."""
    if tensor.dtype != torch.float32 or tensor.numel() < _LARGE:
        return None
    count = _count_nonzero(tensor.detach().reshape(-1))
    return count if count * 2 <= tensor.numel() else None


def _count_nonzero(values: Tensor) -> int:
    # numpy counts many times faster than torch.
    return int(np.count_nonzero(_view_bits(values)))


def _view_bits(values: Tensor) -> np.ndarray:
    """Return float32 values ``(n,)`` as integers, because -0.0 equals 0.0."""
    return values.view(torch.int32).numpy()


class _Stored:
    """The tensors of a checkpoint. What was written once is one object, as it was before: sixty sites may share it."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors
        self._masks: dict[str, Mask] = {}
        self._sparse: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}

    def read_mask(self, packed: Any) -> Mask:
        """Return a mask."""
        entries, bits = _require_type(int, packed["entries"]), _require_type(str, packed["bits"])
        if bits not in self._masks:
            self._masks[bits] = Mask.from_packed(self._tensors[bits].numpy(), entries)
        return self._masks[bits]

    def read_tensor(self, packed: Any) -> Tensor:
        """Return a tensor."""
        if isinstance(packed, str):
            return self._tensors[packed]
        bits, values, shape = packed["bits"], packed["values"], tuple(packed["shape"])
        if (bits, values, shape) not in self._sparse:
            mask = Mask.from_packed(self._tensors[bits].numpy(), math.prod(shape))
            dense = mask.put(self._tensors[values], torch.zeros(mask.size))
            self._sparse[bits, values, shape] = dense.view(shape)
        return self._sparse[bits, values, shape]


def unpack(packed: Any, kind: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`pack` received, of type ``kind``.

    Args:
        packed: JSON.
        kind: a dataclass, ``Tensor``, ``Mask``, a plain type, ``Literal``, ``tuple[X, ...]``, ``list[X]``,
            ``dict[str, X]``, their abstract types ``Sequence[X]`` and ``Mapping[str, X]``, or the union of one of
            these with None.
        tensors: by name.

    Raises:
        CheckpointError: the value is not of the declared type.
    """
    return _unpack(packed, kind, _Stored(tensors), "content")


def _unpack(packed: Any, kind: Any, tensors: _Stored, path: str) -> Any:
    try:
        return _unpack_value(packed, kind, tensors, path)
    except (TypeError, ValueError, KeyError, AttributeError, SelectionError) as error:
        raise CheckpointError(f"{path}: expected {getattr(kind, '__name__', kind)}: {error!r}") from error


def _unpack_value(packed: Any, kind: Any, tensors: _Stored, path: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        # X | None is the only union: with more types, the file would have to name one.
        (inner,) = (part for part in parts if part is not types.NoneType)
        return None if packed is None else _unpack_value(packed, inner, tensors, path)
    build = _COLLECTIONS.get(origin)
    if build is dict:
        items = _require_type(dict, packed).items()
        return {name: _unpack(part, parts[1], tensors, f"{path}.{name}") for name, part in items}
    if build:
        return build(
            _unpack(part, parts[0], tensors, f"{path}.{i}") for i, part in enumerate(_require_type(list, packed))
        )
    if dataclasses.is_dataclass(origin or kind):
        return _unpack_dataclass(packed, kind, tensors, path)
    if kind is Mask:
        return tensors.read_mask(packed)
    return tensors.read_tensor(packed) if kind is Tensor else _require_type(kind, packed)


def _unpack_dataclass(packed: Any, kind: Any, tensors: _Stored, path: str) -> Any:
    """Unpack a dataclass, also a generic one with type arguments, such as ``Progress[State]``."""
    cls = get_origin(kind) or kind
    arguments = dict(zip(getattr(cls, "__parameters__", ()), get_args(kind), strict=True))
    hints = get_type_hints(cls)
    names = sorted(field.name for field in dataclasses.fields(cls))
    if sorted(_require_type(dict, packed)) != names:
        raise CheckpointError(f"{path}: {cls.__name__} has {names}, found {sorted(packed)}")
    parts = {name: arguments.get(hints[name], hints[name]) for name in names}
    return cls(**{name: _unpack(packed[name], part, tensors, f"{path}.{name}") for name, part in parts.items()})


def _require_type(kind: Any, packed: Any) -> Any:
    """Return ``packed`` if it is of type ``kind``; an int is accepted as a float."""
    if get_origin(kind) is Literal:
        if packed not in get_args(kind):
            raise ValueError(f"found {packed!r}")
        return packed
    if kind is float and type(packed) is int:
        return float(packed)
    if type(packed) is not kind:
        raise TypeError(f"found {type(packed).__name__}")
    return packed
