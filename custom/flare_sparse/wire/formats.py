"""The number formats of values in messages: one row each, from which every other part reads what it must know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..core.needs import Need

ValueType = Literal["float32", "float16", "bfloat16", "int8", "int4", "int2", "float32_zstd", "bfloat16_zstd"]
"""Number formats of values in the clear."""

ValueFormat = ValueType | Literal["ckks"]
"""Formats of the values section: a number format, or encrypted."""


@dataclass(frozen=True)
class NumberFormat:
    """How a number format writes values, and what it asks of the other parts of a job.

    Attributes:
        code: its number in the header, never reused.
        dtype: type that the values are rounded to; None: they are quantized in blocks of ``bits`` bits.
        bits: bits of a quantized value.
        is_compressed: whether the rounded values are compressed without loss.
        rounding: largest change of a model's value by rounding, relative to the largest value of its tensor.
        takes: the need that a job with it cannot meet; None: it takes none away.
        needs: what it needs itself.
    """

    code: int
    dtype: torch.dtype | None = None
    bits: int = 0
    is_compressed: bool = False
    rounding: float = 0.0
    takes: Need | None = None
    needs: frozenset[Need] = frozenset({Need.OWN_FORMAT})

    @property
    def width(self) -> int:
        """Bytes of a value before compression; 0 if it is quantized."""
        return self.dtype.itemsize if self.dtype is not None else 0


# Formats of few bits round no buffers, and statistics of inputs are one; so they take no exact statistics away.
FORMATS: dict[ValueType, NumberFormat] = {
    "float32": NumberFormat(1, torch.float32, needs=frozenset()),
    "float16": NumberFormat(2, torch.float16, rounding=2.0**-10, takes=Need.EXACT_STATISTICS),
    "bfloat16": NumberFormat(3, torch.bfloat16, rounding=2.0**-7, takes=Need.EXACT_STATISTICS),
    "int8": NumberFormat(5, bits=8, rounding=2.0**-6, takes=Need.EXACT_MODEL),
    "int4": NumberFormat(6, bits=4, rounding=2.0**-2, takes=Need.EXACT_MODEL),
    "int2": NumberFormat(7, bits=2, rounding=1.0, takes=Need.EXACT_MODEL),
    "float32_zstd": NumberFormat(8, torch.float32, is_compressed=True),
    "bfloat16_zstd": NumberFormat(9, torch.bfloat16, is_compressed=True, rounding=2.0**-7, takes=Need.EXACT_STATISTICS),
}
"""Every number format. A new one is a row here, its name in :data:`ValueType`, and its golden messages."""

FORMAT_CODES: dict[ValueFormat, int] = {**{name: row.code for name, row in FORMATS.items()}, "ckks": 4}
"""Code of each format in the header."""


def is_quantized(value_format: str) -> bool:
    """Whether the values have few bits and a scale for each block."""
    return value_format in FORMATS and FORMATS[value_format].dtype is None


def uncompress(value_type: ValueType) -> ValueType:
    """Return the format of the same values without compression."""
    row = FORMATS[value_type]
    plain = (name for name, other in FORMATS.items() if other.dtype == row.dtype and not other.is_compressed)
    return next(plain) if row.is_compressed else value_type
