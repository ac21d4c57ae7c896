"""Write and read the values section: one flat little-endian buffer, in float32 or rounded with error feedback."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import RejectedMessage
from ..exchange import Patch
from .plan import ValueType

FORMAT_CODES: dict[ValueType, int] = {"float32": 1, "float16": 2, "bfloat16": 3}
BYTES_PER_VALUE: dict[ValueType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_TORCH_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def write_values(patch: Patch, value_type: ValueType, residual: Tensor | None, out: np.ndarray) -> Tensor | None:
    """Write a patch's ``k`` values to ``out``.

    Args:
        patch: the patch; its source may be strided.
        value_type: number format to write.
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
        _require_finite(target, "values")
        return residual
    mask = patch.mask
    new_residual = torch.zeros(mask.size) if residual is None else residual.clone()
    # Error feedback: without it, an update below half a unit in the last place would be rounded away in every round and
    # never reach the receiver. The residual carries it over until it is large enough to be represented.
    exact = patch.values + mask.take(new_residual)
    rounded = exact.to(_TORCH_TYPES[value_type])
    widened = rounded.float()
    _require_finite(widened.numpy(), f"values as {value_type}")
    # numpy has no bfloat16: the bits travel as int16, in the byte order that "<i2" fixes.
    np.copyto(out.view("<i2"), rounded.contiguous().view(torch.int16).numpy())
    return mask.put(exact - widened, new_residual)


def read_values(section: np.ndarray, value_type: ValueType) -> Tensor:
    """Return the values as float32 ``(k,)``; a float32 section that is aligned and writeable is not copied.

    Raises:
        RejectedMessage: a value is NaN or infinite.
    """
    if value_type == "float32":
        values = torch.from_numpy(np.require(section.view("<f4"), requirements=["ALIGNED", "WRITEABLE"]))
    else:
        values = torch.from_numpy(section.view("<i2").copy()).view(_TORCH_TYPES[value_type]).float()
    _require_finite(values.numpy(), "values")
    return values


def is_representable(values: Tensor, value_type: ValueType) -> bool:
    """Whether every value is finite in this format."""
    return bool(torch.isfinite(values if value_type == "float32" else values.to(_TORCH_TYPES[value_type])).all())


def _require_finite(values: np.ndarray, field: str) -> None:
    """Raise RejectedMessage unless every value is finite."""
    # One dot product is several times faster than a test of each value. A finite sum of squares proves that all values
    # are finite; large finite values may overflow it, so only then is each one tested.
    with np.errstate(over="ignore", invalid="ignore"):
        sum_of_squares = np.dot(values, values)
    if not np.isfinite(sum_of_squares) and not np.isfinite(values).all():
        count = int(np.count_nonzero(~np.isfinite(values)))
        raise RejectedMessage("E_FINITE", field, "finite numbers", f"{count} NaN or infinite")
