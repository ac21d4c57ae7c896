"""Messages of the steps in which sums leave the sites (docs/wire-format.md, section "Sums of padded values").

A message holds: magic (4 bytes) | version (uint16) | step (uint16) | id of the sum (36 bytes) | length of the payload
(uint32) | CRC-32 of all of this and of the payload (uint32) | payload. The payload of values starts at a multiple of 8.
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..core.errors import RejectedMessage
from .envelope import is_kind

MAGIC, VERSION = b"FSPS", 1
_HEAD = struct.Struct("<4sHH36sI")
_ID = struct.Struct("<8sQI16s")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEAD.size + _CHECKSUM.size + 4


class Step(IntEnum):
    """The exchanges of a sum, in their order."""

    KEYS = 1
    SHARES = 2
    VALUES = 3
    REVEAL = 4


@dataclass(frozen=True)
class SumId:
    """What identifies one sum: every attempt has its own.

    Attributes:
        run: id of the run, 16 hex digits.
        kind, round: of the request whose updates are summed.
        sequence: number of the attempt.
    """

    run: str
    kind: str
    round: int
    sequence: int

    def to_bytes(self) -> bytes:
        """Return the id in 36 bytes."""
        return _ID.pack(bytes.fromhex(self.run), self.sequence, self.round, self.kind.encode("ascii"))


def pack_message(step: Step, sum_id: SumId, payload: bytes) -> np.ndarray:
    """Return a message, uint8 ``(n,)``."""
    head = _HEAD.pack(MAGIC, VERSION, step, sum_id.to_bytes(), len(payload))
    checksum = _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(head)))
    return np.frombuffer(b"".join([head, checksum, bytes(4), payload]), np.uint8)


def unpack_message(data: np.ndarray, site: str) -> tuple[Step, SumId, bytes]:
    """Return step, id of the sum and payload of a message, which is not trusted.

    Args:
        data: uint8 ``(n,)``.
        site: name of the sender.

    Raises:
        RejectedMessage: the message is malformed or damaged.
    """
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
        raise RejectedMessage("E_DTYPE", "message", "uint8 (n,)", type(data).__name__, site)
    if data.size < HEADER_BYTES:
        raise RejectedMessage("E_LEN", "message", f"at least {HEADER_BYTES} bytes", data.size, site)
    content = data.tobytes()
    magic, version, step, sum_id, size = _HEAD.unpack_from(content)
    if (magic, version) != (MAGIC, VERSION) or step not in list(Step):
        raise RejectedMessage("E_VERSION", "magic, version, step", (MAGIC, VERSION), (magic, version, step), site)
    payload = content[HEADER_BYTES:]
    if len(payload) != size:
        raise RejectedMessage("E_LEN", "payload", size, len(payload), site)
    (checksum,) = _CHECKSUM.unpack_from(content, _HEAD.size)
    if checksum != zlib.crc32(payload, zlib.crc32(content[: _HEAD.size])):
        raise RejectedMessage("E_CRC", "checksum", "the checksum of the content", "another one", site)
    if any(content[_HEAD.size + _CHECKSUM.size : HEADER_BYTES]):
        raise RejectedMessage("E_CANON", "padding", "zero bytes", "other bytes", site)
    run, sequence, t, kind = _ID.unpack(sum_id)
    name = kind.rstrip(b"\0").decode("latin-1")
    if not is_kind(name):
        raise RejectedMessage("E_KIND", "kind", "printable ASCII, zero-padded", kind, site)
    return Step(step), SumId(run.hex(), name, t, sequence), payload
