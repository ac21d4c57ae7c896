"""The 128-byte header of a message and its checks (docs/wire-format.md, version 1)."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from ..errors import RejectedMessage

MAGIC, VERSION = b"FSPM", 1
HEADER_BYTES = 128
_KIND_BYTES = 16
_FORMAT = struct.Struct("<4sH6BIQQ16s8s16s16sQQQ")  # 112 bytes, followed by two checksums
_CHECKS = struct.Struct("<IIQ")
_LANES = 509  # a prime: blocks of a power-of-two size that changed places change the lanes
assert _FORMAT.size + _CHECKS.size == HEADER_BYTES


@dataclass(frozen=True)
class Header:
    """Fields of a message's header; numbers as they stand in it, not yet believed."""

    encoding: int
    trainable: int  # encoding of the trainable section; 0: there is none
    values: int
    content: int
    base: int
    round: int
    sequence: int
    base_sequence: int
    kind: str
    run: bytes
    layout: bytes
    base_mask: bytes
    scalars: int
    selection_bytes: int
    trainable_bytes: int

    @property
    def values_start(self) -> int:
        """Offset of the values: after both sections, at a multiple of 8."""
        return -(-(HEADER_BYTES + self.selection_bytes + self.trainable_bytes) // 8) * 8


def is_kind(name: str) -> bool:
    """1 to 16 printable ASCII characters: safe in a log whoever wrote them."""
    return 1 <= len(name) <= _KIND_BYTES and name.isascii() and name.isprintable()


def write_header(header: Header, buffer: np.ndarray) -> None:
    """Write header and checksums into a message whose sections are in place."""
    packed = _FORMAT.pack(
        MAGIC,
        VERSION,
        header.encoding,
        header.trainable,
        header.values,
        header.content,
        header.base,
        0,
        header.round,
        header.sequence,
        header.base_sequence,
        header.kind.encode("ascii"),
        header.run,
        header.layout,
        header.base_mask,
        header.scalars,
        header.selection_bytes,
        header.trainable_bytes,
    )
    buffer[: _FORMAT.size] = np.frombuffer(packed, np.uint8)
    checks = _CHECKS.pack(*_checksums(buffer, header.values_start))
    buffer[_FORMAT.size : HEADER_BYTES] = np.frombuffer(checks, np.uint8)


def read_header(buffer: np.ndarray) -> Header:
    """The header of a message whose checksums hold.

    Raises:
        RejectedMessage: too short, not ours, of another version, or damaged.
    """
    if buffer.size < HEADER_BYTES:
        raise RejectedMessage("E_LEN", "message", f"at least {HEADER_BYTES} bytes", buffer.size)
    magic, version, *fields = _FORMAT.unpack(buffer[: _FORMAT.size].tobytes())
    if magic != MAGIC or version != VERSION:
        raise RejectedMessage("E_VERSION", "magic, version", (MAGIC, VERSION), (magic, version))
    encoding, trainable, values, content, over, reserved, *rest = fields
    round_, sequence, base, kind, run, layout, known, scalars, selection_bytes, trainable_bytes = rest
    checks = _CHECKS.unpack(buffer[_FORMAT.size : HEADER_BYTES].tobytes())
    if reserved:
        raise RejectedMessage("E_CANON", "reserved", 0, reserved)
    if max(selection_bytes, trainable_bytes) > buffer.size:
        raise RejectedMessage("E_LEN", "sections", f"within {buffer.size} bytes", (selection_bytes, trainable_bytes))
    name = kind.rstrip(b"\0")
    if not is_kind(name.decode("latin-1")):
        raise RejectedMessage("E_KIND", "kind", "printable ASCII, zero-padded", kind)
    header = Header(
        encoding, trainable, values, content, over, round_, sequence, base, name.decode("ascii"), run, layout, known,
        scalars, selection_bytes, trainable_bytes,
    )  # fmt: skip
    if header.values_start > buffer.size:
        raise RejectedMessage("E_LEN", "message", f"at least {header.values_start} bytes", buffer.size)
    if (buffer.size - header.values_start) % 8:
        raise RejectedMessage("E_LEN", "message", "a multiple of 8 bytes", buffer.size)
    if _checksums(buffer, header.values_start) != checks:
        raise RejectedMessage("E_CRC", "checksum", "that of the content", "another: the message is damaged")
    return header


def _checksums(buffer: np.ndarray, values_start: int) -> tuple[int, int, int]:
    """CRC-32 of header and sections; CRC-32 of the values' lane sums; the sum of their 64-bit words.

    Lane ``i`` adds up the words ``i``, ``i + 509``, ... modulo 2^64. The sum finds any single flipped bit, the lanes
    find blocks that changed places, and both cost a fraction of a copy. None of them guards against a forger: that is
    the transport's business.
    """
    sections = zlib.crc32(buffer[HEADER_BYTES:values_start].data, zlib.crc32(buffer[: _FORMAT.size].data))
    words = buffer[values_start:].view("<u8")
    whole = words.size - words.size % _LANES
    lanes = np.add.reduce(words[:whole].reshape(-1, _LANES), axis=0, dtype=np.uint64)
    lanes[: words.size - whole] += words[whole:]
    return sections, zlib.crc32(lanes.astype("<u8", copy=False).data), int(np.add.reduce(lanes))
