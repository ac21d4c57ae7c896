"""Bits as bytes, with zstd where it helps; shared by the encodings that say one bit per entry."""

from __future__ import annotations

import numpy as np
import zstandard

from ...errors import RejectedMessage

_RAW, _ZSTD = 0, 1


def pack(bits: np.ndarray) -> bytes:
    """A flag byte, then the bits ``(n,)`` eight to a byte, the first in the highest bit, compressed if that is less."""
    plain = np.packbits(bits).tobytes()
    squeezed = zstandard.ZstdCompressor(level=3).compress(plain)
    return bytes([_ZSTD]) + squeezed if len(squeezed) < len(plain) else bytes([_RAW]) + plain


def unpack(raw: np.ndarray, count: int) -> np.ndarray:
    """``count`` bits ``(count,)`` bool; never more memory than they need, whatever ``raw`` claims.

    Raises:
        RejectedMessage: wrong length, unknown flag, padding bits set, or a bad zstd frame.
    """
    size = (count + 7) // 8
    if not raw.size:
        raise RejectedMessage("E_LEN", "selection", f"up to {size + 1} bytes", 0)
    flag, body = int(raw[0]), raw[1:].tobytes()
    if flag not in (_RAW, _ZSTD):
        raise RejectedMessage("E_CANON", "selection flag", (_RAW, _ZSTD), flag)
    plain = body if flag == _RAW else _inflate(body, size)
    if len(plain) != size:
        raise RejectedMessage("E_LEN", "selection", f"{size} bytes for {count} bits", len(plain))
    packed = np.frombuffer(plain, np.uint8)
    if count % 8 and packed[-1] & (0xFF >> count % 8):
        raise RejectedMessage("E_CANON", "selection padding", "zero bits", hex(packed[-1]))
    return np.unpackbits(packed, count=count).view(bool)


def _inflate(body: bytes, size: int) -> bytes:
    try:
        claimed = zstandard.frame_content_size(body)
        if not 0 < size == claimed:
            raise RejectedMessage("E_SIZE", "selection", f"a zstd frame of {size} bytes", claimed)
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RejectedMessage("E_LEN", "selection", "a zstd frame", str(error)[:60]) from error
