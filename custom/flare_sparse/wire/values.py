"""Values on the wire: one flat little-endian buffer, in float32 or shorter with the rounding kept at the sender."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import RejectedMessage
from ..exchange import Patch
from .plan import ValueType

CODES: dict[ValueType, int] = {"float32": 1, "float16": 2, "bfloat16": 3}
WIDTH: dict[ValueType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def write(patch: Patch, kind: ValueType, residual: Tensor | None, out: np.ndarray) -> Tensor | None:
    """Write a patch's ``k`` values to ``out`` (uint8, ``k * WIDTH`` bytes).

    Args:
        patch: its source may be strided.
        kind: number format.
        residual: ``(P,)`` what earlier messages rounded off; None: nothing.
        out: part of the message.

    Returns:
        The new residual ``(P,)``, unchanged off ``on``; None for float32, which rounds nothing.

    Raises:
        RejectedMessage: a value is NaN, infinite, or does not fit the format; nothing is sent.
    """
    if kind == "float32":
        target, source = out.view("<f4"), patch.source.detach().numpy()
        if source.size == target.size:
            np.copyto(target, source)
        else:  # mode: the indices are a mask's own and need no second check
            np.take(source, patch.mask.indices.numpy(), out=target, mode="clip")
        _require_finite(target, "values")
        return residual
    on = patch.mask
    kept = torch.zeros(on.size) if residual is None else residual.clone()
    wanted = patch.values + on.take(kept)
    short = wanted.to(_TORCH[kind])
    widened = short.float()
    _require_finite(widened.numpy(), f"values as {kind}")
    np.copyto(out.view("<i2"), short.contiguous().view(torch.int16).numpy())
    return on.put(wanted - widened, kept)


def read(raw: np.ndarray, kind: ValueType) -> Tensor:
    """float32 values ``(k,)``; for float32 a view of the message where it may be one.

    Raises:
        RejectedMessage: a value is NaN or infinite.
    """
    if kind == "float32":
        values = torch.from_numpy(np.require(raw.view("<f4"), requirements=["ALIGNED", "WRITEABLE"]))
    else:
        values = torch.from_numpy(raw.view("<i2").copy()).view(_TORCH[kind]).float()
    _require_finite(values.numpy(), "values")
    return values


def is_representable(values: Tensor, kind: ValueType) -> bool:
    """Whether each value is a finite number in this format."""
    return bool(torch.isfinite(values if kind == "float32" else values.to(_TORCH[kind])).all())


def _require_finite(numbers: np.ndarray, field: str) -> None:
    """A finite sum of squares says that all are finite; only when it overflows is each one looked at."""
    with np.errstate(over="ignore", invalid="ignore"):
        quick = np.dot(numbers, numbers)
    if not np.isfinite(quick) and not np.isfinite(numbers).all():
        bad = int(np.count_nonzero(~np.isfinite(numbers)))
        raise RejectedMessage("E_FINITE", field, "finite numbers", f"{bad} NaN or infinite")
