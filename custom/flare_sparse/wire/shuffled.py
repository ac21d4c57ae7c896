"""Lossless coding of float values: bits rotated, bytes of equal significance side by side, each such column with zstd.

A section holds: length of each column in bytes (uint64) | columns, that of the lowest bytes first. A column is a zstd
frame that states its size, or the plain bytes if a frame would not be shorter: its length tells which. The exponents of
a network's values repeat, its signs and mantissas hardly do. Each value is rotated by one bit to the left, so that the
8 bits of the exponent are one byte, and the bytes are shuffled (as in HDF5): the exponents compress to about 3 bits.
"""

from itertools import pairwise

import numpy as np

from ..core.errors import RejectedMessage
from .encodings.bits import compress, decompress

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


def measure_shuffled(buffer: np.ndarray, scalars: int, width: int) -> int:
    """Return the length in bytes of the section at the start of ``buffer``, uint8, which may be longer.

    Raises:
        RejectedMessage: the buffer is too short, or a column is longer than its plain bytes.
    """
    lengths = _read_lengths(buffer, width)
    if max(lengths) > scalars:
        raise RejectedMessage("E_SIZE", "values", f"columns of at most {scalars} bytes", max(lengths))
    return LENGTH_BYTES * width + sum(lengths)


def unpack_shuffled(section: np.ndarray, scalars: int, width: int) -> np.ndarray:
    """Return the values in the plain format, uint8 ``(scalars * width,)``. Memory is bounded by their number.

    Args:
        section: uint8 ``(n,)``, not trusted; :func:`measure_shuffled` has checked its length.
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
