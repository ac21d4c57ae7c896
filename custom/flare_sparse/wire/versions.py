"""Versions of the wire format: which header layout and which encodings each one has.

A released version never changes, so that its messages stay readable. A new version is a new entry of ``VERSIONS``; it
may have another header layout, more encodings or fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core.errors import RejectedMessage
from . import envelope
from .encodings import ENCODINGS, Encoding
from .envelope import MAGIC, Header
from .formats import ValueFormat, list_formats


@dataclass(frozen=True)
class WireVersion:
    """One version of the wire format.

    Attributes:
        number: number in the header, from 1.
        encodings: encodings that its messages may use. Of two encodings with the same number of bytes, the encoder
            uses the one listed first.
        value_formats: value formats that its messages may have.
        header_bytes: length of the header, a multiple of 8 and at least ``envelope.HEADER_BYTES``.
        read_header: returns the header of a message of this version, raises RejectedMessage if it is wrong.
        write_header: writes header and checksums into a message whose sections and values are in place.
    """

    number: int
    encodings: tuple[Encoding, ...]
    value_formats: tuple[ValueFormat, ...]
    header_bytes: int
    read_header: Callable[[np.ndarray], Header]
    write_header: Callable[[Header, np.ndarray], None]

    @cached_property
    def encodings_by_code(self) -> dict[int, Encoding]:
        """The encodings of this version by their code in the header."""
        return {encoding.code: encoding for encoding in self.encodings}

    def find_encoding(self, code: int, field: str) -> Encoding:
        """Return the encoding that has ``code`` in this version.

        Raises:
            RejectedMessage: this version has no such encoding, even if another version has.
        """
        if code not in self.encodings_by_code:
            raise RejectedMessage("E_VERSION", field, sorted(self.encodings_by_code), code)
        return self.encodings_by_code[code]


# Each version names its encodings: one that is added to the package later does not become part of an old version.
_V1_ENCODINGS = tuple(ENCODINGS[name] for name in ("dense", "shared", "shrink", "bitmap", "csr", "slices"))
VERSIONS: dict[int, WireVersion] = {
    1: WireVersion(
        number=1,
        encodings=_V1_ENCODINGS,
        value_formats=(*list_formats(1), "ckks"),
        header_bytes=envelope.HEADER_BYTES,
        read_header=envelope.read_header,
        write_header=envelope.write_header,
    ),
    2: WireVersion(
        number=2,
        encodings=(*_V1_ENCODINGS, ENCODINGS["gaps"]),
        value_formats=list_formats(2),
        header_bytes=envelope.HEADER_BYTES,
        read_header=envelope.read_header,
        write_header=envelope.write_header,
    ),
}
"""Every version that this package reads, by number."""

CURRENT_VERSION = 2
"""The newest version that this package reads and writes. Both ends of a run must have the same."""


def choose_version(value_format: ValueFormat) -> WireVersion:
    """Return the version that this package writes for a value format: the oldest that has it.

    So a format keeps its bytes when a version is added.
    """
    return next(version for _, version in sorted(VERSIONS.items()) if value_format in version.value_formats)


def find_version(buffer: np.ndarray) -> WireVersion:
    """Return the version that a message is written in.

    Args:
        buffer: uint8 ``(n,)``, the whole message.

    Raises:
        RejectedMessage: the message is shorter than any header, or of a format or version that is not read here.
    """
    magic, number = envelope.read_prefix(buffer)
    if magic != MAGIC or number not in VERSIONS:
        raise RejectedMessage("E_VERSION", "magic, version", (MAGIC, sorted(VERSIONS)), (magic, number))
    return VERSIONS[number]
