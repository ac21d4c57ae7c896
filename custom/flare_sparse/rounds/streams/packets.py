"""Packets: the messages of all streams in one FLARE message, and what a receiver needs to read them, in plain types."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...core.errors import RejectedMessage
from .arrays import Arrays, Specs, is_array, is_array_type, is_coded, is_torch

MODEL = "model"
"""Name of the stream of the model; the others have the names of the groups."""

Groups = dict[str, dict[str, Any]]
Packet = dict[str, Any]


def find_groups(values: Mapping[str, Any], model: Mapping[str, Any]) -> Groups:
    """Return the mappings of arrays among ``values`` that can be coded, without their items that are not.

    Args:
        values: metadata of a message.
        model: arrays of its model; a group has arrays of the same names and shapes, all of one type.
    """
    groups = {}
    for name, group in values.items():
        if name == MODEL or not isinstance(group, dict) or not all(is_array(array) for array in group.values()):
            continue
        coded = {key: array for key, array in group.items() if is_coded(key, array)}
        has_shapes = all(key in model and tuple(array.shape) == tuple(model[key].shape) for key, array in coded.items())
        if has_shapes and len({(str(array.dtype), is_torch(array)) for array in coded.values()}) == 1:
            groups[name] = coded
    return groups


def build_kind(name: str) -> str:
    """Return the kind of a stream's messages, at most 16 characters."""
    return name if name == MODEL else f"extra-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


def read_parts(packet: Any, sender: str) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] | None = packet.get("parts") if isinstance(packet, dict) else None
    is_valid = isinstance(parts, dict) and all(
        isinstance(name, str) and isinstance(part, dict) for name, part in parts.items()
    )
    if not is_valid or parts is None or MODEL not in parts:
        raise RejectedMessage("E_KIND", "content", "a packet with a model", "something else", sender)
    return parts


def read_message(part: dict[str, Any], sender: str) -> np.ndarray:
    message = part.get("message")
    if not isinstance(message, np.ndarray) or message.dtype != np.uint8 or message.ndim != 1:
        raise RejectedMessage("E_DTYPE", "message", "uint8 (n,)", type(message).__name__, sender)
    return message


def align_arrays(group: Mapping[str, Any], specs: Specs) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return a group in the layout of the model, and what a receiver needs to restore it."""
    arrays = Arrays.from_mapping(group)
    by_name = {spec.name: (spec, tensor) for spec, tensor in zip(arrays.specs, _split(arrays), strict=True)}
    shapes = {spec.name: spec.shape for spec in specs}
    for spec in arrays.specs:
        if shapes.get(spec.name) != spec.shape:
            raise RejectedMessage("E_SHAPE", spec.name, shapes.get(spec.name, "an array of the model"), spec.shape)
    missing = [spec.name for spec in specs if spec.name not in by_name]
    pieces = [
        by_name[spec.name][1] if spec.name in by_name else torch.zeros(int(np.prod(spec.shape, dtype=np.int64)))
        for spec in specs
    ]
    part: dict[str, Any] = {"missing": missing} if missing else {}
    types = {(spec.dtype, spec.library) for spec in arrays.specs}
    if any(spec.name in by_name and by_name[spec.name][0] != spec for spec in specs):
        # One type for all: the arrays of a model that changes its types on the way would need a table.
        if len(types) != 1:
            raise RejectedMessage("E_DTYPE", "arrays", "the types of the received arrays, or one type", sorted(types))
        part["type"] = list(types.pop())
    return torch.cat(pieces) if pieces else torch.zeros(0), part


def _split(arrays: Arrays) -> list[torch.Tensor]:
    return [tensor.reshape(-1) for tensor in arrays.layout.unflatten(arrays.vector).values()]


def restore_arrays(part: Mapping[str, Any], specs: Specs, vector: torch.Tensor) -> dict[str, Any]:
    """Return the arrays of an update in their own types.

    Args:
        part: part of the packet.
        specs: arrays of the model.
        vector: float32 ``(P,)`` in the layout of the model.

    Raises:
        RejectedMessage: the part of the packet is malformed.
    """
    missing, types = part.get("missing", []), part.get("type")
    if not isinstance(missing, (list, tuple)) or not {spec.name for spec in specs}.issuperset(map(str, missing)):
        raise RejectedMessage("E_LAYOUT", "missing", "names of arrays", type(missing).__name__)
    if types is not None:
        if not isinstance(types, (list, tuple)) or len(types) != 2 or not is_array_type(*types):
            raise RejectedMessage("E_DTYPE", "type", "a number type and a library", types)
        specs = tuple(replace(spec, dtype=types[0], library=types[1]) for spec in specs)
    arrays = Arrays(specs, vector).to_mapping()
    return {name: array for name, array in arrays.items() if name not in missing}
