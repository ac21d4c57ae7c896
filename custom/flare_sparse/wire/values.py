"""Values in plain formats: one flat little-endian buffer, in float32 or rounded with error feedback."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..core.errors import RejectedMessage
from ..core.exchange import Patch
from .formats import FORMATS, ValueType, is_quantized
from .quantized import LARGEST, compute_quantized_bytes
from .shuffled import LENGTH_BYTES

_INTEGERS = {1: torch.int8, 2: torch.int16}
"""Type of the bits of a rounded value, by its bytes."""


def compute_min_value_bytes(scalars: int, value_type: ValueType) -> int:
    """Return the length of the shortest section with so many values; the values may make it longer."""
    if is_quantized(value_type):
        return compute_quantized_bytes(scalars, value_type, 0)
    width = FORMATS[value_type].width
    return LENGTH_BYTES * width if FORMATS[value_type].is_compressed else width * scalars


def write_values(
    patch: Patch, dtype: torch.dtype, residual: Tensor | None, out: np.ndarray
) -> tuple[Tensor | None, Tensor | None]:
    """Write a patch's ``k`` values to ``out``.

    Args:
        patch: the patch; its source may be strided.
        dtype: type that the values are rounded to.
        residual: ``(P,)`` what earlier messages lost to rounding; None: nothing.
        out: uint8 ``(k * dtype.itemsize,)``, the values section of the message.

    Returns:
        The new residual ``(P,)``, unchanged outside ``patch.mask``, and the values ``(k,)`` that a receiver reads.
        float32 does not round: ``residual`` stays, and the receiver reads the values of the patch (None).

    Raises:
        RejectedMessage: a value is NaN, infinite, or out of the format's range; the message must not be sent.
    """
    if dtype == torch.float32:
        target, source = out.view("<f4"), patch.source.detach().numpy()
        if source.size == target.size:
            np.copyto(target, source)
        else:
            # mode="clip" skips numpy's bounds check: indices of a mask are in range.
            np.take(source, patch.mask.indices.numpy(), out=target, mode="clip")
        require_finite(target, "values")
        return residual, None
    # Error feedback: without it, an update below half a unit in the last place would be rounded away in every round and
    # never reach the receiver. The residual carries it over until it is large enough to be represented.
    new_residual, exact = add_residual(patch, residual)
    rounded = exact.to(dtype)
    widened = rounded.float()
    require_finite(widened.numpy(), f"values as {str(dtype).removeprefix('torch.')}")
    # numpy has no bfloat16: the bits travel as integers, in the byte order that "<i" fixes.
    np.copyto(out.view(f"<i{dtype.itemsize}"), rounded.contiguous().view(_INTEGERS[dtype.itemsize]).numpy())
    return patch.mask.put(exact - widened, new_residual), widened


def add_residual(patch: Patch, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a vector ``(P,)`` for the next residual, which holds the last one, and the values with it ``(k,)``."""
    if residual is None:
        # torch would write every entry; numpy takes memory that the system clears where it is first written.
        return torch.from_numpy(np.zeros(patch.mask.size, np.float32)), patch.values + 0.0
    return residual.clone(), patch.values + patch.mask.take(residual)


def read_values(section: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return the values as float32 ``(k,)``; a float32 section that is aligned and writeable is not copied.

    Raises:
        RejectedMessage: a value is NaN or infinite.
    """
    if dtype == torch.float32:
        values = torch.from_numpy(np.require(section.view("<f4"), requirements=["ALIGNED", "WRITEABLE"]))
    else:
        values = torch.from_numpy(section.view(f"<i{dtype.itemsize}").copy()).view(dtype).float()
    require_finite(values.numpy(), "values")
    return values


def is_representable(values: Tensor, value_type: ValueType) -> bool:
    """Whether every value is finite in this format."""
    dtype = FORMATS[value_type].dtype
    if dtype is None:
        return bool((values.abs() <= LARGEST).all())
    return _is_finite(values.to(dtype).float().detach().numpy())


def require_finite(values: np.ndarray, field: str) -> None:
    """Raise RejectedMessage unless every value of float32 ``(k,)`` is finite."""
    if not _is_finite(values):
        count = int(np.count_nonzero(~np.isfinite(values)))
        raise RejectedMessage("E_FINITE", field, "finite numbers", f"{count} NaN or infinite")


def _is_finite(values: np.ndarray) -> bool:
    """Return whether every value of float32 ``(k,)`` is finite."""
    # One dot product is several times faster than a test of each value. A finite sum of squares proves that all values
    # are finite; large finite values may overflow it, so only then is each one tested.
    with np.errstate(over="ignore", invalid="ignore"):
        sum_of_squares = np.dot(values, values)
    return bool(np.isfinite(sum_of_squares) or np.isfinite(values).all())
