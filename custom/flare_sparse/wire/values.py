"""Values in plain formats: one flat little-endian buffer, in float32 or rounded with error feedback, or compressed.

Lossless coding of float values: bits rotated, bytes of equal significance side by side, each such column with zstd.

A section holds: length of each column in bytes (uint64) | columns, that of the lowest bytes first. A column is a zstd
frame that states its size, or the plain bytes if a frame would not be shorter: its length tells which. The exponents of
a network's values repeat, its signs and mantissas hardly do. Each value is rotated by one bit to the left, so that the
8 bits of the exponent are one byte, and the bytes are shuffled (as in HDF5): the exponents compress to about 3 bits.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..core.errors import RejectedMessage
from ..core.exchange import Patch
from ..core.mask import Mask
from ..core.params import Layout
from .encodings.bits import compress, decompress
from .number_format import CodedValues, Coding, NumberFormat, add_residual, is_finite, require_finite

LENGTH_BYTES = 8
"""Bytes of the length of each column, at the start of the section."""
# Higher levels look for repeated strings, which exponents do not have, and then write more bytes, more slowly.
_LEVEL = 1


def pack_shuffled(plain: np.ndarray, width: int) -> np.ndarray:
    """Return the section of values of ``width`` bytes each.

    Args:
        plain: uint8 ``(k * width,)``, the values in the plain format.
        width: bytes of a value.
    """
    words = plain.view(f"<u{width}")
    rotated = (words << 1) | (words >> (8 * width - 1))
    columns = [_pack_column(rotated.view(np.uint8)[place::width].tobytes()) for place in range(width)]
    lengths = np.array([len(column) for column in columns], "<u8").tobytes()
    return np.frombuffer(b"".join([lengths, *columns]), np.uint8)


def unpack_shuffled(section: np.ndarray, scalars: int, width: int) -> np.ndarray:
    """Return the values in the plain format, uint8 ``(scalars * width,)``. Memory is bounded by their number.

    Args:
        section: uint8 ``(n,)``, not trusted; :meth:`Compressed.measure` has checked its length.
        scalars: number of values.
        width: bytes of a value.

    Raises:
        RejectedMessage: a column is neither plain nor a zstd frame of its size.
    """
    ends = LENGTH_BYTES * width + np.cumsum([0, *_read_lengths(section, width)])
    # Allocated by the receiver's own count; a column of another size is refused before it is written here.
    rotated = np.empty((scalars, width), np.uint8)
    for place, (start, end) in enumerate(pairwise(ends.tolist())):
        column = section[start:end].tobytes()
        plain = column if len(column) == scalars else decompress(column, scalars, "values")
        rotated[:, place] = np.frombuffer(plain, np.uint8)
    words = rotated.view(f"<u{width}").reshape(-1)
    return ((words >> 1) | (words << (8 * width - 1))).view(np.uint8)


def _pack_column(plain: bytes) -> bytes:
    frame = compress(plain, _LEVEL)
    return frame if len(frame) < len(plain) else plain


def _read_lengths(buffer: np.ndarray, width: int) -> list[int]:
    if buffer.size < LENGTH_BYTES * width:
        raise RejectedMessage("E_LEN", "values", f"at least {LENGTH_BYTES * width} bytes", buffer.size)
    # As Python's integers: a sum of four uint64 that the sender chose could wrap around.
    lengths: list[int] = np.frombuffer(buffer[: LENGTH_BYTES * width].tobytes(), "<u8").tolist()
    return lengths


_INTEGERS = {1: torch.int8, 2: torch.int16}
"""Type of the bits of a rounded value, by its bytes."""


@dataclass(frozen=True, kw_only=True)
class Plain(NumberFormat):
    """Values rounded to a type ``dtype``, one after the other."""

    dtype: torch.dtype

    def compute_min_bytes(self, scalars: int) -> int:
        return self.dtype.itemsize * scalars

    def seal(self, patch: Patch, coding: Coding, out: np.ndarray | None = None) -> CodedValues:
        """Return the section; the residual of float32, which does not round, stays."""
        if out is None:
            out = np.empty(self.dtype.itemsize * patch.mask.count, np.uint8)
        if self.dtype == torch.float32:
            target, source = out.view("<f4"), patch.source.detach()
            if source.numel() == target.size or source.device.type != "cpu":
                np.copyto(target, patch.values.detach().cpu().numpy())
            else:
                # mode="clip" skips numpy's bounds check: indices of a mask are in range.
                np.take(source.numpy(), patch.mask.indices.numpy(), out=target, mode="clip")
            require_finite(torch.from_numpy(target), "values")
            return CodedValues(out, coding.residual)
        # Error feedback: without it, an update below half a unit in the last place would be rounded away in every round
        # and never reach the receiver. The residual carries it over until it is large enough to be represented.
        new_residual, exact = add_residual(patch, coding.residual)
        rounded = exact.to(self.dtype)
        widened = rounded.float()
        require_finite(widened, f"values as {str(self.dtype).removeprefix('torch.')}")
        # numpy has no bfloat16: the bits travel as integers, in the byte order that "<i" fixes.
        integers = rounded.contiguous().view(_INTEGERS[self.dtype.itemsize]).cpu().numpy()
        np.copyto(out.view(f"<i{self.dtype.itemsize}"), integers)
        return CodedValues(out, patch.mask.put(exact - widened, new_residual), widened)

    def open(self, section: np.ndarray, mask: Mask, layout: Layout, base_vector: Tensor | None) -> Tensor:
        """Return the values; a float32 section that is aligned and writeable is not copied."""
        if self.dtype == torch.float32:
            values = torch.from_numpy(np.require(section.view("<f4"), requirements=["ALIGNED", "WRITEABLE"]))
        else:
            integers = section.view(f"<i{self.dtype.itemsize}").copy()
            values = torch.from_numpy(integers).view(self.dtype).float()
        require_finite(values, "values")
        return values

    def can_hold(self, values: Tensor) -> bool:
        return is_finite(values.to(self.dtype).float())


@dataclass(frozen=True, kw_only=True)
class Compressed(Plain):
    """The same bytes, compressed without loss."""

    def compute_min_bytes(self, scalars: int) -> int:
        return LENGTH_BYTES * self.dtype.itemsize

    def measure(self, buffer: np.ndarray, scalars: int, layout: Layout) -> int:
        lengths = _read_lengths(buffer, self.dtype.itemsize)
        if max(lengths) > scalars:
            raise RejectedMessage("E_SIZE", "values", f"columns of at most {scalars} bytes", max(lengths))
        return LENGTH_BYTES * self.dtype.itemsize + sum(lengths)

    def seal(self, patch: Patch, coding: Coding, out: np.ndarray | None = None) -> CodedValues:
        plain = super().seal(patch, coding)
        return CodedValues(pack_shuffled(plain.section, self.dtype.itemsize), plain.residual, plain.received)

    def open(self, section: np.ndarray, mask: Mask, layout: Layout, base_vector: Tensor | None) -> Tensor:
        return super().open(unpack_shuffled(section, mask.count, self.dtype.itemsize), mask, layout, base_vector)
