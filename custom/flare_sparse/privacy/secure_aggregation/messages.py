"""Payloads of the messages of a sum (docs/wire-format.md, section "Sums of padded values").

Sites are named by one byte with the length and the UTF-8 bytes of the name.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO

import numpy as np

from ...core.errors import RejectedMessage
from ...wire.steps import HEADER_BYTES, Step, SumId, unpack_message
from .keys import MAX_KEYS_BYTES, SHARE_BYTES, SignedKeys
from .party import BOX_BYTES
from .rings import MAX_SITES

FINGERPRINT_BYTES = 16


def unpack_reply(data: np.ndarray, step: Step, sum_id: SumId, site: str) -> bytes:
    """Return the payload of a site's reply in a step of a sum.

    Raises:
        RejectedMessage: the message is malformed, damaged, or of another step or sum.
    """
    actual_step, actual_id, payload = unpack_message(data, site)
    if (actual_step, actual_id) != (step, sum_id):
        raise RejectedMessage("E_REPLAY", "step, sum", step.name, actual_step.name, site)
    return payload


def pack_members(members: Sequence[SignedKeys]) -> bytes:
    """Return the payload of the keys of all sites."""
    parts = ((keys.name, keys.to_bytes()) for keys in members)
    return _pack_named((name, struct.pack("<H", len(keys)) + keys) for name, keys in parts)


def unpack_members(payload: bytes) -> list[SignedKeys]:
    """Return the keys of all sites.

    Raises:
        RejectedMessage: the payload is malformed.
    """
    return [SignedKeys.from_bytes(name, keys) for name, keys in _iterate_named(payload, None)]


def pack_boxes(boxes: Mapping[str, bytes]) -> bytes:
    """Return the payload of the boxes for one site, by sender."""
    return _pack_named(sorted(boxes.items()))


def unpack_boxes(payload: bytes) -> dict[str, bytes]:
    """Return the boxes for this site, each an encrypted share of a secret, by sender.

    Raises:
        RejectedMessage: the payload is malformed.
    """
    named = list(_iterate_named(payload, BOX_BYTES))
    if len(boxes := dict(named)) < len(named):
        # The server has put the payload together.
        raise RejectedMessage("E_CANON", "boxes", "one of each sender", "two of one", "server")
    return boxes


def pack_names(names: Sequence[str]) -> bytes:
    """Return the payload of a list of sites."""
    return _pack_named((name, b"") for name in names)


def unpack_names(payload: bytes) -> list[str]:
    """Return a list of sites.

    Raises:
        RejectedMessage: the payload is malformed.
    """
    return [name for name, _ in _iterate_named(payload, 0)]


def split_payload(payload: bytes, size: int, site: str) -> list[bytes]:
    """Return the parts of ``size`` bytes of a payload: the boxes or the shares of a reply.

    Raises:
        RejectedMessage: its length is no multiple of ``size``.
    """
    if len(payload) % size or len(payload) > size * MAX_SITES:
        raise RejectedMessage("E_LEN", "payload", f"a multiple of {size} bytes", len(payload), site)
    return [payload[start : start + size] for start in range(0, len(payload), size)]


def bound_reply_bytes(step: Step, section_bytes: int, sites: int) -> int:
    """Return the largest length of a site's reply in a step."""
    sizes = {
        Step.KEYS: MAX_KEYS_BYTES,
        Step.SHARES: BOX_BYTES * sites,
        Step.VALUES: FINGERPRINT_BYTES + section_bytes,
        Step.REVEAL: SHARE_BYTES * sites,
    }
    return HEADER_BYTES + sizes[step]


def _pack_named(parts: Iterable[tuple[str, bytes]]) -> bytes:
    return b"".join(bytes([len(name.encode())]) + name.encode() + content for name, content in parts)


def _iterate_named(payload: bytes, size: int | None) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each site in a payload that is not trusted.

    Args:
        payload: the payload.
        size: bytes of a content; None: its length (uint16) is before it.

    Raises:
        RejectedMessage: the payload is malformed, or has too many sites.
    """
    stream = BytesIO(payload)

    def read(length: int) -> bytes:
        part = stream.read(length)
        if len(part) != length:
            raise RejectedMessage("E_LEN", "payload", f"{length} more bytes", len(part), "server")
        return part

    count = 0
    while stream.tell() < len(payload):
        try:
            name = read(read(1)[0]).decode()
        except UnicodeDecodeError as error:
            raise RejectedMessage("E_CANON", "name", "UTF-8", "other bytes", "server") from error
        yield name, read(struct.unpack("<H", read(2))[0] if size is None else size)
        count += 1
        if count > MAX_SITES:
            raise RejectedMessage("E_SIZE", "sites", f"at most {MAX_SITES}", count, "server")
