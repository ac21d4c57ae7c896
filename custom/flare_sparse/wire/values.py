"""Value formats, and the plain ones: one flat little-endian buffer, in float32 or rounded with error feedback."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..core.errors import RejectedMessage
from ..core.exchange import Patch
from .ciphertexts import FORMAT_CODE as CIPHERTEXT_CODE
from .plan import ValueFormat, ValueType
from .quantized import BITS, LARGEST, compute_quantized_bytes
from .shuffled import bound_shuffled_bytes

FORMAT_CODES: dict[ValueFormat, int] = {
    "float32": 1,
    "float16": 2,
    "bfloat16": 3,
    "ckks": CIPHERTEXT_CODE,
    "int8": 5,
    "int4": 6,
    "int2": 7,
    "float32_zstd": 8,
    "bfloat16_zstd": 9,
}
"""Code of each format in the header, never reused."""
BYTES_PER_VALUE: dict[ValueType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Width of a value, by plain format."""
COMPRESSED: dict[ValueType, ValueType] = {"float32_zstd": "float32", "bfloat16_zstd": "bfloat16"}
"""Plain format of the values, by compressed format."""
_TORCH_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def is_quantized(value_type: str) -> bool:
    """Whether the values have few bits and a scale for each block."""
    return value_type in BITS


def compute_value_bytes(scalars: int, value_type: ValueType, buffers: int = 0) -> tuple[int, int]:
    """Return the shortest and the longest section with so many values; they differ where the values decide the length.

    Args:
        scalars: number of values.
        value_type: number format.
        buffers: most values that can be those of buffers, which quantized formats do not round.
    """
    if is_quantized(value_type):
        most_exact = compute_quantized_bytes(scalars, value_type, min(scalars, buffers))
        return compute_quantized_bytes(scalars, value_type, 0), most_exact
    if value_type in COMPRESSED:
        return bound_shuffled_bytes(scalars, BYTES_PER_VALUE[COMPRESSED[value_type]])
    size = BYTES_PER_VALUE[value_type] * scalars
    return size, size


def write_values(patch: Patch, value_type: ValueType, residual: Tensor | None, out: np.ndarray) -> Tensor | None:
    """Write a patch's ``k`` values to ``out``.

    Args:
        patch: the patch; its source may be strided.
        value_type: plain number format to write.
        residual: ``(P,)`` what earlier messages lost to rounding; None: nothing.
        out: uint8 ``(k * BYTES_PER_VALUE[value_type],)``, the values section of the message.

    Returns:
        The new residual ``(P,)``, unchanged outside ``patch.mask``. float32 does not round and returns ``residual``.

    Raises:
        RejectedMessage: a value is NaN, infinite, or out of the format's range; the message must not be sent.
    """
    if value_type == "float32":
        target, source = out.view("<f4"), patch.source.detach().numpy()
        if source.size == target.size:
            np.copyto(target, source)
        else:
            # mode="clip" skips numpy's bounds check: indices of a mask are in range.
            np.take(source, patch.mask.indices.numpy(), out=target, mode="clip")
        require_finite(target, "values")
        return residual
    # Error feedback: without it, an update below half a unit in the last place would be rounded away in every round and
    # never reach the receiver. The residual carries it over until it is large enough to be represented.
    new_residual, exact = add_residual(patch, residual)
    rounded = exact.to(_TORCH_TYPES[value_type])
    widened = rounded.float()
    require_finite(widened.numpy(), f"values as {value_type}")
    # numpy has no bfloat16: the bits travel as int16, in the byte order that "<i2" fixes.
    np.copyto(out.view("<i2"), rounded.contiguous().view(torch.int16).numpy())
    return patch.mask.put(exact - widened, new_residual)


def add_residual(patch: Patch, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a vector ``(P,)`` for the next residual, which holds the last one, and the values with it ``(k,)``."""
    if residual is None:
        # torch would write every entry; numpy takes memory that the system clears where it is first written.
        return torch.from_numpy(np.zeros(patch.mask.size, np.float32)), patch.values + 0.0
    return residual.clone(), patch.values + patch.mask.take(residual)


def read_values(section: np.ndarray, value_type: ValueType) -> Tensor:
    """Return the values as float32 ``(k,)``; a float32 section that is aligned and writeable is not copied.

    Raises:
        RejectedMessage: a value is NaN or infinite.
    """
    if value_type == "float32":
        values = torch.from_numpy(np.require(section.view("<f4"), requirements=["ALIGNED", "WRITEABLE"]))
    else:
        values = torch.from_numpy(section.view("<i2").copy()).view(_TORCH_TYPES[value_type]).float()
    require_finite(values.numpy(), "values")
    return values


def is_representable(values: Tensor, value_type: ValueType) -> bool:
    """Whether every value is finite in this format."""
    if is_quantized(value_type):
        return bool((values.abs() <= LARGEST).all())
    value_type = COMPRESSED.get(value_type, value_type)
    rounded = values if value_type == "float32" else values.to(_TORCH_TYPES[value_type]).float()
    return _is_finite(rounded.detach().numpy())


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
