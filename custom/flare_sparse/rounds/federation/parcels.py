"""What the collections of server and hub hold: topics, replies of sites as parcels, and the questions of the server.

A hub and the server read nothing of each other, and nothing of a site, without a check.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import MissingBase, RejectedMessage, abbreviate
from ...privacy.secure_aggregation.messages import FINGERPRINT_BYTES
from ...privacy.secure_aggregation.rings import SectionFormat
from ...wire.collection import MAX_NOTE_BYTES, Parcel
from ...wire.envelope import is_kind
from ..endpoints.server import Attempt
from .replies import SumQuestions

_CODE = re.compile("[A-Z][A-Z_]{0,23}")
# Room for what a collection adds to a note.
_NOTE_MARGIN = 64
# A value with so few is nested no deeper, and the server's parser can read it.
_MAX_BRACKETS = 500
HELLO, EXCHANGE, SUM = "hello", "exchange", "sum"
"""Topics of collections: the handshake, the requests of an attempt, the questions of a step of a sum."""
MAX_SECTION_BYTES = 2**32 - 2**10
"""Longest section that a hub allocates; with its header, its length is one of 32 bits in a collection."""


@dataclass(frozen=True)
class SiteReply:
    """A site's reply to a request, as a hub receives and passes it on; nothing of it is validated.

    Attributes:
        message: encoded update, without values: they follow in the sum.
        examples, metrics, events: what travels beside it.
    """

    message: Any
    examples: Any
    metrics: Any
    events: Any


RawReply = SiteReply | MissingBase | str
"""Reply of a site before its validation; a text is the reason code of a refusal."""


def pack_reply(site: str, reply: RawReply) -> Parcel:
    """Return a site's reply to a request as a parcel."""
    if isinstance(reply, MissingBase):
        return Parcel((site,), {"missing_base": True})
    if isinstance(reply, str):
        return pack_code(site, reply)
    if reply.message is None:
        return Parcel((site,), {"code": "E_DTYPE"})
    # Nothing is cast, so that the server refuses what it refuses without hubs; JSON would make text of these names.
    if isinstance(reply.metrics, dict) and not all(isinstance(name, str) for name in reply.metrics):
        return Parcel((site,), {"code": "E_METRICS"})
    # A malformed report costs no site its update.
    events = None if _measure_json(reply.events) is None else reply.events
    note = {"examples": reply.examples, "metrics": reply.metrics, "events": events}
    return pack_parcel(site, note, reply.message, code="E_METRICS")


def pack_parcel(site: str, note: dict[str, Any], message: np.ndarray | None = None, *, code: str) -> Parcel:
    """Return a parcel of one site or, where a collection cannot hold it, one with a reason code.

    A collection is read or refused as a whole: without this check, one site could cost all sites of the hub their
    contribution.

    Args:
        site: name of the site.
        note: what travels beside the message, not validated.
        message: the site's message, not validated; None: the note alone.
        code: reason code of a note that is not JSON.
    """
    size = _measure_json(note)
    if size is None:
        return Parcel((site,), {"code": code})
    if message is not None and (not isinstance(message, np.ndarray) or message.dtype != np.uint8 or message.ndim != 1):
        return Parcel((site,), {"code": "E_DTYPE"})
    if size > MAX_NOTE_BYTES - _NOTE_MARGIN or (message is not None and message.size >= 2**32):
        return Parcel((site,), {"code": "E_SIZE"})
    return Parcel((site,), note, message)


def _measure_json(value: Any) -> int | None:
    """Return the length of a value as JSON; None if it has no such form or may be nested too deeply to be read."""
    try:
        text = json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None
    return len(text) if text.count("[") + text.count("{") <= _MAX_BRACKETS else None


def pack_code(site: str, code: str) -> Parcel:
    """Return the parcel of a site without a message; text that is no reason code becomes ``E_SITE``."""
    return Parcel((site,), {"code": read_code({"code": code})})


def unpack_reply(parcel: Parcel) -> RawReply:
    """Return a site's reply from the parcel of a hub; a parcel that is none is a refusal."""
    site, note = parcel.sites[0], parcel.note
    if note.get("missing_base") is True:
        return MissingBase("E_NOT_HELD", "base", "the base of the message", "nothing", site)
    if parcel.message is None:
        return read_code(note)
    return SiteReply(parcel.message, note.get("examples"), note.get("metrics"), note.get("events"))


def read_code(note: Mapping[str, Any]) -> str:
    """Return the reason code in a note, or ``E_SITE``: other text of a site or a hub must not enter a record."""
    code = note.get("code")
    return code if isinstance(code, str) and _CODE.fullmatch(code) else "E_SITE"


def read_attempt(subject: Mapping[str, Any], parcels: Sequence[Parcel]) -> Attempt:
    """Return the attempt that a collection of the server is about.

    Raises:
        RejectedMessage: the subject is malformed.
    """
    acknowledged: dict[str, int] = {}
    for parcel in parcels:
        newest, late = _read_count(parcel.note, "acknowledged"), parcel.note.get("late", {})
        if not isinstance(late, dict):
            raise RejectedMessage("E_CANON", "late", "numbers by site", abbreviate(late), "server")
        acknowledged.update((site, _read_count(late, site) if site in late else newest) for site in parcel.sites)
    kind = subject.get("kind")
    if not isinstance(kind, str) or not is_kind(kind):
        raise RejectedMessage("E_KIND", "kind", "1 to 16 printable characters", "something else", "server")
    sequence, t = _read_count(subject, "sequence"), _read_count(subject, "round")
    return Attempt(sequence, kind, t, _list_messages(parcels), acknowledged, _read_seconds(subject))


def read_questions(subject: Mapping[str, Any], parcels: Sequence[Parcel]) -> SumQuestions:
    """Return the questions that a collection of the server holds.

    Raises:
        RejectedMessage: the subject is malformed.
    """
    lengths, selection = subject.get("section"), subject.get("selection")
    if not isinstance(selection, str) or not re.fullmatch(f"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}", selection):
        raise RejectedMessage("E_MASK", "selection", "a fingerprint", "something else", "server")
    messages, seconds = _list_messages(parcels), _read_seconds(subject)
    if lengths is None:
        return SumQuestions(messages, seconds, None, selection)
    # The hub allocates a section before any site replies, so its length is bounded.
    is_pair = isinstance(lengths, list) and len(lengths) == 2 and all(type(length) is int for length in lengths)
    if not is_pair or not 0 <= lengths[0] <= lengths[1] <= MAX_SECTION_BYTES or lengths[0] % 8 or lengths[1] % 4:
        raise RejectedMessage("E_LEN", "section", "the lengths of a section", "something else", "server")
    return SumQuestions(messages, seconds, SectionFormat(*lengths), selection)


def _list_messages(parcels: Sequence[Parcel]) -> dict[str, np.ndarray]:
    """Return the message for each site; one buffer for all sites of a parcel.

    Raises:
        RejectedMessage: a parcel has no message.
    """
    messages = {}
    for parcel in parcels:
        if parcel.message is None:
            raise RejectedMessage("E_CANON", "parcel", "a message", "none", "server")
        messages.update(dict.fromkeys(parcel.sites, parcel.message))
    return messages


def _read_count(note: Mapping[str, Any], name: str) -> int:
    value = note.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise RejectedMessage("E_CANON", name, "a whole number from 0", abbreviate(value), "server")
    return value


def _read_seconds(subject: Mapping[str, Any]) -> float | None:
    value = subject.get("seconds")
    if value is None or (isinstance(value, (int, float)) and 0 <= value < math.inf):
        return value
    raise RejectedMessage("E_CANON", "seconds", "a number from 0, or none", abbreviate(value), "server")
