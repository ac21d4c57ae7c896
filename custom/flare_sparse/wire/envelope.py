"""The message header and its checksums (docs/wire-format.md, section "Header")."""

import struct
import zlib
from dataclasses import asdict, dataclass

import numpy as np

from ..core.errors import RejectedMessage

MAGIC = b"FSPM"
VERSION = 1
"""Version of the format. Both ends of a run must have the same."""
HEADER_BYTES = 128

_KIND_BYTES = 16
# "<" fixes little-endian order without alignment padding: the bytes do not depend on the host.
_FIELDS = struct.Struct("<4sH6BIQ8s8s8s16s8s16sQQQ")
_CHECKSUMS = struct.Struct("<IIQ")
# A prime: blocks of a power-of-two size that trade places move their words to other lanes.
_LANES = 509
assert _FIELDS.size + _CHECKSUMS.size == HEADER_BYTES


@dataclass(frozen=True)
class Header:
    """Fields of a message header, in the order of the format.

    Numbers are as received; the decoder checks them against its plan.

    Attributes:
        encoding: code of the selection's encoding.
        trainable: code of the trainable section's encoding; 0: the message has no such section.
        values: code of the value format.
        content: code of the content.
        patch_base: code of the patch's base.
        round: round of the request.
        sequence: number of the attempt.
        base: name of the vector that the message builds on; ``NO_NAME``: it builds on none.
        target: name of the vector that the request leads to.
        request: name of the request.
        kind: kind of the request.
        run: 8 bytes that identify the run.
        layout: 16 bytes, fingerprint of the layout.
        scalars: number of values.
        selection_bytes: length of the selection section.
        trainable_bytes: length of the trainable section.
    """

    encoding: int
    trainable: int
    values: int
    content: int
    patch_base: int
    round: int
    sequence: int
    base: str
    target: str
    request: str
    kind: str
    run: bytes
    layout: bytes
    scalars: int
    selection_bytes: int
    trainable_bytes: int

    @property
    def values_start(self) -> int:
        """Offset of the values: the first multiple of 8 after both sections."""
        return round_up_to_words(HEADER_BYTES + self.selection_bytes + self.trainable_bytes)


def round_up_to_words(size: int) -> int:
    """Return the smallest multiple of 8 that is at least ``size``."""
    return -(-size // 8) * 8


def is_kind(name: str) -> bool:
    """Whether ``name`` has 1 to 16 printable ASCII characters, which are safe to write to a log."""
    return 1 <= len(name) <= _KIND_BYTES and name.isascii() and name.isprintable()


def write_header(header: Header, buffer: np.ndarray) -> None:
    """Write header and checksums into a message whose sections and values are already in place."""
    # The format has the fields in the order of the class, and a reserved byte behind the first five.
    names = {name: bytes.fromhex(getattr(header, name)) for name in ("base", "target", "request")}
    values = list({**asdict(header), **names, "kind": header.kind.encode("ascii")}.values())
    fields = _FIELDS.pack(MAGIC, VERSION, *values[:5], 0, *values[5:])
    buffer[: _FIELDS.size] = np.frombuffer(fields, np.uint8)
    write_checksums(buffer, header.values_start)


def write_checksums(buffer: np.ndarray, values_start: int) -> None:
    """Write the checksums of a message that is otherwise complete."""
    packed = _CHECKSUMS.pack(*_compute_checksums(buffer, values_start))
    buffer[_FIELDS.size : HEADER_BYTES] = np.frombuffer(packed, np.uint8)


def read_header(buffer: np.ndarray) -> Header:
    """Return the header of a message whose lengths and checksums are right.

    Raises:
        RejectedMessage: it is shorter than a header or of another format or version; or a reserved field, a length, the
            kind or a checksum is wrong.
    """
    if buffer.size < HEADER_BYTES:
        raise RejectedMessage("E_LEN", "message", f"at least {HEADER_BYTES} bytes", buffer.size)
    magic, version, encoding, trainable, values, content, base, reserved, *rest = _FIELDS.unpack(
        buffer[: _FIELDS.size].tobytes()
    )
    round_, sequence, base_name, target, request, kind, run, layout, scalars, selection_bytes, trainable_bytes = rest
    checksums = _CHECKSUMS.unpack(buffer[_FIELDS.size : HEADER_BYTES].tobytes())
    if (magic, version) != (MAGIC, VERSION):
        raise RejectedMessage("E_VERSION", "magic, version", (MAGIC, VERSION), (magic, version))
    # Refused rather than ignored, so that a later version can give the byte a meaning.
    if reserved:
        raise RejectedMessage("E_CANON", "reserved", 0, reserved)
    # Before the sum of the two lengths is used: each is a uint64 that the sender chose freely.
    if max(selection_bytes, trainable_bytes) > buffer.size:
        lengths = (selection_bytes, trainable_bytes)
        raise RejectedMessage("E_LEN", "sections", f"at most {buffer.size} bytes each", lengths)
    name = kind.rstrip(b"\0")
    if not is_kind(name.decode("latin-1")):
        raise RejectedMessage("E_KIND", "kind", "printable ASCII, zero-padded", kind)
    header = Header(
        encoding, trainable, values, content, base, round_, sequence, base_name.hex(), target.hex(), request.hex(),
        name.decode("ascii"), run, layout, scalars, selection_bytes, trainable_bytes,
    )  # fmt: skip
    if header.values_start > buffer.size:
        raise RejectedMessage("E_LEN", "message", f"at least {header.values_start} bytes", buffer.size)
    # The checksums read the values as 64-bit words; a partial word could not be summed.
    if (buffer.size - header.values_start) % 8:
        raise RejectedMessage("E_LEN", "message", "a multiple of 8 bytes", buffer.size)
    if _compute_checksums(buffer, header.values_start) != checksums:
        raise RejectedMessage("E_CRC", "checksum", "the checksum of the content", "another one: damaged message")
    return header


def _compute_checksums(buffer: np.ndarray, values_start: int) -> tuple[int, int, int]:
    """Return the CRC-32 of header and sections, the CRC-32 of the lane sums, and the sum of the values' 64-bit words.

    Lane ``i`` is the sum of the words ``i``, ``i + 509``, ... modulo 2^64. The checksums detect accidents, not forgery:
    the transport authenticates the sender.
    """
    sections = zlib.crc32(buffer[HEADER_BYTES:values_start].data, zlib.crc32(buffer[: _FIELDS.size].data))
    words = buffer[values_start:].view("<u8")
    # A CRC over the values would take longer than writing them. The word sum detects every single flipped bit, the
    # lane sums detect blocks in the wrong order, and both cost a fraction of a copy.
    in_full_rows = words.size - words.size % _LANES
    lanes = np.add.reduce(words[:in_full_rows].reshape(-1, _LANES), axis=0, dtype=np.uint64)
    lanes[: words.size - in_full_rows] += words[in_full_rows:]
    return sections, zlib.crc32(lanes.astype("<u8", copy=False).data), int(np.add.reduce(lanes))
