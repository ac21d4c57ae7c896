"""Named arrays of NumPy or torch as one vector, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError, RejectedMessage
from ...core.params import Layout, TensorSpec

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Number types of coded arrays. The vector is float32: values of float64 are rounded."""

_BUFFERS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"
_PLAIN = (bool, int, float, str, np.generic, type(None))


@dataclass(frozen=True)
class ArraySpec:
    """One array.

    Attributes:
        name: name of the array.
        shape: its shape.
        dtype: one of ``FLOATS``.
        library: ``"numpy"`` or ``"torch"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    library: str


Specs = tuple[ArraySpec, ...]


@dataclass(frozen=True)
class Arrays:
    """Arrays as one vector.

    Attributes:
        specs: the arrays, in the order of the vector.
        vector: float32 ``(P,)``.
    """

    specs: Specs
    vector: Tensor

    @classmethod
    def from_mapping(cls, arrays: Mapping[str, Any]) -> Arrays:
        """Copy named float arrays into a vector."""
        specs = tuple(_describe_array(name, array) for name, array in arrays.items())
        flat = [_to_float32(array).reshape(-1) for array in arrays.values()]
        return cls(specs, torch.from_numpy(np.concatenate(flat)) if flat else torch.zeros(0))

    @cached_property
    def layout(self) -> Layout:
        """Layout of the vector."""
        return build_layout(self.specs)

    def to_mapping(self) -> dict[str, Any]:
        """Copy the vector into named arrays of their own types."""
        starts = np.cumsum([0, *(np.prod(spec.shape, dtype=np.int64) for spec in self.specs)]).tolist()
        flat = self.vector.numpy()
        return {
            spec.name: _from_float32(flat[start:end].reshape(spec.shape), spec)
            for spec, (start, end) in zip(self.specs, pairwise(starts), strict=True)
        }


def build_layout(specs: Specs) -> Layout:
    """Return the layout of arrays; running statistics, known by torch's names, are buffers."""
    # A message names no roles: both ends must derive the same ones, or their layouts' fingerprints differ.
    return Layout(
        tuple(
            TensorSpec(spec.name, spec.shape, "buffer" if spec.name.endswith(_BUFFERS) else "other") for spec in specs
        )
    )


def split_arrays(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the float arrays, and all other values: arrays of integers and bools, and plain values.

    Raises:
        ConfigError: a value is neither an array nor a plain value, such as ciphertext or a reference to a tensor that
            is streamed or on disk.
    """
    floats: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, (np.ndarray, Tensor, *_PLAIN)):
            raise ConfigError(
                f"sparse exchange: {name!r} is of type {type(value).__name__}, not an array. Encrypted values, "
                "streamed tensors and tensors on disk cannot be coded: turn them off, or leave out the sparse exchange"
            )
        (floats if is_coded(name, value) else others)[name] = value
    return floats, others


def is_coded(name: str, value: Any) -> bool:
    """Whether a value is a float array, except counters of batch normalization."""
    # FLARE's mean of the counters is a float: with them, the layout would change after a round.
    return is_array(value) and _get_dtype(value) in FLOATS and not name.endswith(_COUNTER)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy or torch."""
    return isinstance(value, (np.ndarray, Tensor))


def write_specs(specs: Specs) -> list[list[Any]]:
    """Return specs as plain lists, for a message."""
    return [[spec.name, list(spec.shape), spec.dtype, spec.library] for spec in specs]


def read_specs(rows: Any) -> Specs:
    """Return the specs in a message.

    Raises:
        RejectedMessage: the rows are malformed.
    """
    is_list = isinstance(rows, Sequence) and not isinstance(rows, str)
    if not is_list or not all(_is_spec(row) for row in rows) or len({row[0] for row in rows}) != len(rows):
        raise RejectedMessage("E_LAYOUT", "arrays", "rows of name, shape, type and library", "others")
    return tuple(ArraySpec(name, tuple(shape), dtype, library) for name, shape, dtype, library in rows)


def _is_spec(row: Any) -> bool:
    if not isinstance(row, (list, tuple)) or len(row) != 4:
        return False
    name, shape, dtype, library = row
    # Not bool, which is an int; below 2^40, so that a product of a few sizes stays a small number.
    is_shape = (
        isinstance(shape, (list, tuple))
        and len(shape) <= 16
        and all(type(size) is int and 0 <= size < 2**40 for size in shape)
    )
    return isinstance(name, str) and is_shape and is_array_type(dtype, library)


def is_array_type(dtype: Any, library: Any) -> bool:
    """Whether a library of arrays has a number type."""
    return dtype in FLOATS and (library == "torch" or (library == "numpy" and dtype != "bfloat16"))


def _describe_array(name: str, array: Any) -> ArraySpec:
    return ArraySpec(
        name, tuple(int(size) for size in array.shape), _get_dtype(array), "torch" if is_torch(array) else "numpy"
    )


def is_torch(array: Any) -> bool:
    """Whether an array is one of torch."""
    return isinstance(array, Tensor)


def _get_dtype(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _to_float32(array: Any) -> np.ndarray:
    plain = array.detach().cpu().to(torch.float32).numpy() if is_torch(array) else array
    # float64 may overflow to infinity, which the encoder rejects with a clear error.
    with np.errstate(over="ignore"):
        return np.asarray(plain, dtype=np.float32)


def _from_float32(array: np.ndarray, spec: ArraySpec) -> Any:
    # Always a copy: whatever uses the arrays may change them in place.
    if spec.library == "torch":
        return torch.from_numpy(array.copy()).to(getattr(torch, spec.dtype))
    with np.errstate(over="ignore"):
        return array.astype(spec.dtype)
