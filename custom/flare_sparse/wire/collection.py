"""Collections: what a server and a hub send each other, the messages of several sites in one (docs/wire-format.md).

A collection holds: magic (4 bytes) | version (uint16) | zero (uint16) | length of the content (uint64) | CRC-32 of the
content (uint32) | content: the subject, then the parcels. A parcel holds its sites, a note as JSON, and a message; each
has its length (uint32) before it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.errors import RejectedMessage

MAGIC, VERSION = b"FSPB", 1
_HEAD = struct.Struct("<4sHHQI")
_LENGTH = struct.Struct("<I")
MAX_NOTE_BYTES = 2**16
"""Longest note; the metrics of a site have at most 64 names of 64 characters."""


@dataclass(frozen=True)
class Parcel:
    """A message and the sites that it is for, or from.

    Attributes:
        sites: names of the sites.
        note: what travels beside the message, plain JSON values.
        message: uint8 ``(n,)``; None: the note alone.
    """

    sites: tuple[str, ...]
    note: dict[str, Any] = field(default_factory=dict)
    message: np.ndarray | None = None


def pack_collection(subject: dict[str, Any], parcels: Sequence[Parcel]) -> np.ndarray:
    """Return a collection, uint8 ``(n,)``.

    Args:
        subject: what the collection is about, plain JSON values.
        parcels: its parcels.
    """
    parts = [_pack_json(subject)]
    for parcel in parcels:
        parts.append(_pack_json(list(parcel.sites)))
        # A note without a message differs from one with an empty message.
        parts.append(_pack_json({**parcel.note, "message": parcel.message is not None}))
        parts.append(b"" if parcel.message is None else parcel.message.tobytes())
    content = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return np.frombuffer(_HEAD.pack(MAGIC, VERSION, 0, len(content), zlib.crc32(content)) + content, np.uint8)


def unpack_collection(data: Any, sender: str) -> tuple[dict[str, Any], list[Parcel]]:
    """Return subject and parcels of a collection, which is not trusted.

    Args:
        data: the collection.
        sender: name of the sender, for the error.

    Raises:
        RejectedMessage: the collection is malformed or damaged.
    """
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
        raise RejectedMessage("E_DTYPE", "collection", "uint8 (n,)", type(data).__name__, sender)
    content = data.tobytes()
    if len(content) < _HEAD.size:
        raise RejectedMessage("E_LEN", "collection", f"at least {_HEAD.size} bytes", len(content), sender)
    magic, version, zero, size, checksum = _HEAD.unpack_from(content)
    if (magic, version, zero) != (MAGIC, VERSION, 0):
        raise RejectedMessage("E_VERSION", "magic, version", (MAGIC, VERSION), (magic, version), sender)
    if len(content) != _HEAD.size + size:
        raise RejectedMessage("E_LEN", "collection", _HEAD.size + size, len(content), sender)
    if zlib.crc32(memoryview(content)[_HEAD.size :]) != checksum:
        raise RejectedMessage("E_CRC", "checksum", "the checksum of the content", "another one", sender)
    parts = _iterate_parts(content, sender)
    # A missing part is an empty one, which is no JSON: a collection cut at the border of a part is refused, too.
    subject, parcels = _read_json(next(parts, b""), dict, sender), []
    for sites in parts:
        note = _read_json(next(parts, b""), dict, sender)
        message = np.frombuffer(next(parts, b""), np.uint8)
        parcels.append(Parcel(_read_names(sites, sender), note, message if note.pop("message", None) else None))
    return subject, parcels


def _iterate_parts(content: bytes, sender: str) -> Iterator[bytes]:
    position = _HEAD.size
    # Lengths come from the sender, so each is compared with what is there before anything is copied.
    while position < len(content):
        start = position + _LENGTH.size
        (size,) = _LENGTH.unpack(content[position:start].ljust(_LENGTH.size, b"\0"))
        if start + size > len(content):
            raise RejectedMessage("E_LEN", "part of a collection", size, len(content) - start, sender)
        yield content[start : start + size]
        position = start + size


def _pack_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _read_json(part: bytes, form: type[Any], sender: str) -> Any:
    """Return the JSON value of a part.

    Raises:
        RejectedMessage: it is no JSON value of this type, or too long.
    """
    if len(part) > MAX_NOTE_BYTES and form is dict:
        raise RejectedMessage("E_SIZE", "note", f"at most {MAX_NOTE_BYTES} bytes", len(part), sender)
    try:
        value = json.loads(part)
    except (ValueError, RecursionError) as error:
        raise RejectedMessage("E_CANON", "note", "JSON", "other bytes", sender) from error
    if not isinstance(value, form):
        raise RejectedMessage("E_CANON", "note", form.__name__, type(value).__name__, sender)
    return value


def _read_names(part: bytes, sender: str) -> tuple[str, ...]:
    names = _read_json(part, list, sender)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise RejectedMessage("E_CANON", "sites", "different names", "something else", sender)
    return tuple(names)
