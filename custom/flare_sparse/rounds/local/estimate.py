"""Least, typical and most bytes of a run, from the messages of a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...core.exchange import STATISTICS
from ...methods.method import Method, get_site_limits
from ...methods.traffic.base import MessageFacts, SelectionBounds
from ...privacy.secure_aggregation.keys import MAX_KEYS_BYTES
from ...privacy.secure_aggregation.messages import FINGERPRINT_BYTES, HEADER_BYTES
from ...training import Site
from ...wire.capabilities import local_capabilities
from ...wire.codec import bound_message_bytes, compute_min_message_bytes
from ...wire.envelope import round_up_to_words
from ...wire.formats import FORMATS, ValueType
from ...wire.ledger import LedgerLine

CIPHERTEXT_TOLERANCE = 0.001
"""Largest relative deviation of an encrypted message's length: ciphertexts are compressed, and their noise is new."""

CERTIFICATES_REASON = (
    "the certificates of the startup kits decide how long the keys of masked sums are; typical are those of a run on "
    "one machine"
)


@dataclass(frozen=True)
class BytesRange:
    """Bytes of one or several messages.

    Attributes:
        least, most: bounds that no run exceeds where every site answers every request at the first attempt.
        typical: bytes in the dry run.
    """

    least: int = 0
    typical: int = 0
    most: int = 0

    def __add__(self, other: BytesRange) -> BytesRange:
        return BytesRange(self.least + other.least, self.typical + other.typical, self.most + other.most)

    @property
    def is_exact(self) -> bool:
        """Whether every run sends these bytes."""
        return self.least == self.most


def bound_messages(
    method: Method[Any, Any], lines: Iterable[LedgerLine], sites: Mapping[str, Site]
) -> Iterator[tuple[LedgerLine, BytesRange, str]]:
    """Yield each message of a dry run with its bytes and, where the data decides them, the reason.

    Args:
        method: the method of the dry run.
        lines: ledger of the dry run.
        sites: its sites.
    """
    # As a federation does after the handshake: a site may have limits of its own.
    method = method.configure_for({name: local_capabilities(**get_site_limits(site)) for name, site in sites.items()})
    buffers = sum(tensor.size for tensor in method.layout.tensors if tensor.role == "buffer")
    for line in lines:
        facts = MessageFacts(
            line.direction,
            line.kind,
            line.round,
            line.site,
            line.scalars_sent,
            line.selection_bytes,
            len(sites),
            sites[line.site].site_settings,
        )
        is_fixed = line.kind == STATISTICS or (line.content == "metrics" and line.direction == "up")
        bounds = None if is_fixed else method.traffic.bound_selection(facts)
        size = _bound_bytes(line, bounds, buffers, len(sites))
        # Bounds that meet in one number of bytes are exact, whatever decides the entries.
        if size.is_exact:
            yield line, size, ""
        elif _count_certificates(line, len(sites)):
            yield line, size, CERTIFICATES_REASON
        else:
            yield line, size, bounds.reason if bounds is not None else ""


def _bound_bytes(line: LedgerLine, bounds: SelectionBounds | None, buffers: int, sites: int) -> BytesRange:
    if line.values == "ckks":
        margin = round(line.payload_bytes * CIPHERTEXT_TOLERANCE)
        return BytesRange(line.payload_bytes - margin, line.payload_bytes, line.payload_bytes + margin)
    if line.values in ("masked", "fixed_point"):
        return _bound_sum_bytes(line, bounds, sites)
    total, values = line.scalars_total, cast(ValueType, line.values)
    if bounds is None:
        if not FORMATS[values].is_compressed:
            return BytesRange(line.payload_bytes, line.payload_bytes, line.payload_bytes)
        # The values decide how far they compress, and those of a dry run are noise.
        least, most = bound_message_bytes(line.scalars_sent, values, selection_bytes=line.selection_bytes)
        return BytesRange(least, line.payload_bytes, most)
    # A bitmap can name any selection, and naming all entries needs no bytes.
    bitmap = 0 if bounds.is_known else round_up_to_words(-(-total // 8))
    most = bound_message_bytes(min(bounds.most, total - 1), values, buffers=buffers)[1] + bitmap
    if bounds.most == total:
        most = max(most, bound_message_bytes(total, values, buffers=buffers)[1])
    return BytesRange(compute_min_message_bytes(bounds.least, values), line.payload_bytes, most)


def _bound_sum_bytes(line: LedgerLine, bounds: SelectionBounds | None, sites: int) -> BytesRange:
    """Return the bytes of a message of a sum; those with certificates are as long as the federation's."""
    size = line.payload_bytes
    if line.scalars_sent:
        if bounds is None:
            return BytesRange(size, size, size)
        # 4 bytes a value, and 8 for buffers.
        start = HEADER_BYTES + FINGERPRINT_BYTES
        return BytesRange(start + 4 * bounds.least, size, start + 8 * bounds.most)
    count = _count_certificates(line, sites)
    return BytesRange(HEADER_BYTES if count else size, size, size + count * MAX_KEYS_BYTES)


def _count_certificates(line: LedgerLine, sites: int) -> int:
    """Return how many certificates a message holds, of which each federation has others."""
    if line.values != "masked" or (line.encoding, line.direction) not in (("keys", "up"), ("shares", "down")):
        return 0
    return 1 if line.encoding == "keys" else sites
