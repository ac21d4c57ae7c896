"""Bits packed into bytes, with zstd where it helps; used by the encodings that write one bit per entry."""

import numpy as np
import zstandard

from ...core.errors import RejectedMessage

_PLAIN, _ZSTD = 0, 1


def pack_bits(bits: np.ndarray) -> bytes:
    """Return a flag byte and the bits ``(n,)``, eight to a byte, first bit highest, compressed if that is shorter."""
    plain = np.packbits(bits).tobytes()
    compressed = compress(plain)
    return bytes([_ZSTD]) + compressed if len(compressed) < len(plain) else bytes([_PLAIN]) + plain


def unpack_bits(section: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` bits, bool ``(count,)``. Memory is bounded by ``count``, not by the section.

    Raises:
        RejectedMessage: the length or the flag is wrong, padding bits are set, or the zstd frame is invalid.
    """
    size = (count + 7) // 8
    if not section.size:
        raise RejectedMessage("E_LEN", "selection", f"up to {size + 1} bytes", 0)
    flag, body = int(section[0]), section[1:].tobytes()
    if flag not in (_PLAIN, _ZSTD):
        raise RejectedMessage("E_CANON", "selection flag", (_PLAIN, _ZSTD), flag)
    plain = body if flag == _PLAIN else decompress(body, size, "selection")
    if len(plain) != size:
        raise RejectedMessage("E_LEN", "selection", f"{size} bytes for {count} bits", len(plain))
    packed = np.frombuffer(plain, np.uint8)
    # Canonical form: unpackbits would ignore these bits, so two messages could mean the same selection.
    if count % 8 and packed[-1] & (0xFF >> count % 8):
        raise RejectedMessage("E_CANON", "selection padding", "zero bits", hex(packed[-1]))
    return np.unpackbits(packed, count=count).view(bool)


def compress(plain: bytes, level: int = 3) -> bytes:
    """Return a zstd frame that states its size; one version of zstd always gives the same bytes."""
    return zstandard.ZstdCompressor(level=level).compress(plain)


def decompress(body: bytes, size: int, field: str) -> bytes:
    """Return the content of a zstd frame of exactly ``size`` bytes. Memory is bounded by ``size``.

    Raises:
        RejectedMessage: the frame is invalid, has another size, or is followed by other bytes.
    """
    try:
        # A few kilobytes of zstd can expand to gigabytes. The frame must state exactly the size that the layout gives,
        # and the decompressor stops there in case the frame lies.
        stated = zstandard.frame_content_size(body)
        if not 0 < size == stated:
            raise RejectedMessage("E_SIZE", field, f"a zstd frame of {size} bytes", stated)
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RejectedMessage("E_LEN", field, "a zstd frame", str(error)[:60]) from error
