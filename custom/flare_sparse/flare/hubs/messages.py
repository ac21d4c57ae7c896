"""The questions of a hub to a site and their answers, as bytes, and the FLARE tasks that a site makes of them.

Both are collections (docs/wire-format.md) with one parcel, so that neither end reads more than bytes, JSON and names,
and both refuse what is malformed. A question names no site: the connection says for which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable

from ...core.errors import RejectedMessage, WireError, abbreviate
from ...rounds.endpoints.server import Attempt
from ...rounds.federation import RawReply, SiteLinks, SiteReply, SumQuestions
from ...rounds.federation.parcels import (
    EXCHANGE,
    HELLO,
    SUM,
    pack_code,
    pack_parcel,
    pack_reply,
    read_code,
    unpack_reply,
)
from ...wire.collection import Parcel, pack_collection, unpack_collection
from ..payload import (
    ACKNOWLEDGED,
    EVENTS,
    extract_hello,
    extract_sum_reply,
    message_to_shareable,
    read_refusal,
    shareable_to_message,
    sum_to_shareable,
)
from ..payload import HELLO as HELLO_TASK
from ..payload import SUM as SUM_TASK
from ..payload import TASK as EXCHANGE_TASK

MAX_ANSWER_BYTES = 2**20
"""Longest answer of a site without values: metrics, keys, shares; an answer with values may be longer by these."""
RECEIVER = "*"
"""Stands in a question for the site that fetches it.

A site learns no names of others from it, and sites with equal questions share one buffer.
"""
Ask = Callable[[Mapping[str, bytes], float | None, int], Mapping[str, bytes]]
"""Asks sites their questions; the other arguments are the seconds and the longest answer."""


def build_site_links(ask: Ask) -> SiteLinks:
    """Return the links of a hub to its sites, whose collections ``ask`` carries."""
    return SiteLinks(partial(_exchange, ask), partial(_exchange_sum, ask), partial(_collect_hellos, ask))


def _exchange(ask: Ask, attempt: Attempt) -> dict[str, RawReply]:
    subject = {"topic": EXCHANGE, "kind": attempt.kind, "round": attempt.round}
    notes = {site: {ACKNOWLEDGED: acknowledged} for site, acknowledged in attempt.acknowledged.items()}
    parcels = _read_answers(ask(_pack_questions(subject, attempt.messages, notes), attempt.seconds, MAX_ANSWER_BYTES))
    return {site: parcel if isinstance(parcel, str) else unpack_reply(parcel) for site, parcel in parcels.items()}


def _exchange_sum(ask: Ask, questions: SumQuestions) -> dict[str, np.ndarray | str]:
    size = MAX_ANSWER_BYTES + (0 if questions.section is None else questions.section.size)
    parcels = _read_answers(ask(_pack_questions({"topic": SUM}, questions.messages, {}), questions.seconds, size))
    return {site: parcel if isinstance(parcel, str) else _read_message(parcel) for site, parcel in parcels.items()}


def _pack_questions(
    subject: dict[str, Any], messages: Mapping[str, np.ndarray], notes: Mapping[str, dict[str, Any]]
) -> dict[str, bytes]:
    """Return the question to each site; sites with equal ones share one buffer."""
    packed: dict[tuple[int, str], bytes] = {}
    contents = {}
    for site, message in messages.items():
        note = notes.get(site, {})
        key = id(message), repr(note)
        if key not in packed:
            packed[key] = pack_collection(subject, [Parcel((RECEIVER,), note, message)]).tobytes()
        contents[site] = packed[key]
    return contents


def _collect_hellos(ask: Ask, names: list[str]) -> dict[str, Any]:
    content = pack_collection({"topic": HELLO}, [Parcel((RECEIVER,))]).tobytes()
    parcels = _read_answers(ask(dict.fromkeys(names, content), None, MAX_ANSWER_BYTES))
    return {site: None if isinstance(parcel, str) else parcel.note.get("hello") for site, parcel in parcels.items()}


def _read_message(parcel: Parcel) -> np.ndarray | str:
    return read_code(parcel.note) if parcel.message is None else parcel.message


def _read_answers(answers: Mapping[str, bytes]) -> dict[str, Parcel | str]:
    """Return the parcel in each site's answer, or the code of the error in it."""
    parcels: dict[str, Parcel | str] = {}
    for site, answer in answers.items():
        try:
            _, found = unpack_collection(np.frombuffer(answer, np.uint8), site)
            # A site speaks for itself only; the listener has its name from its certificate.
            if [parcel.sites for parcel in found] != [(site,)]:
                raise RejectedMessage("E_KIND", "sites", site, "others", site)
            parcels[site] = found[0]
        except WireError as error:
            parcels[site] = error.code
    return parcels


def read_question(content: bytes, hub: str) -> tuple[str, str, Shareable]:
    """Return topic, FLARE task and its data of a hub's question to a site.

    Raises:
        RejectedMessage: the question is malformed.
    """
    subject, parcels = unpack_collection(np.frombuffer(content, np.uint8), hub)
    topic = subject.get("topic")
    if [parcel.sites for parcel in parcels] != [(RECEIVER,)]:
        raise RejectedMessage("E_KIND", "sites", RECEIVER, "others", hub)
    if topic == HELLO:
        return topic, HELLO_TASK, Shareable()
    message, note = parcels[0].message, parcels[0].note
    if message is None:
        raise RejectedMessage("E_CANON", "parcel", "a message", "none", hub)
    if topic == SUM:
        return topic, SUM_TASK, sum_to_shareable(message)
    if topic == EXCHANGE:
        meta = {"kind": subject.get("kind"), "round": subject.get("round"), ACKNOWLEDGED: note.get(ACKNOWLEDGED)}
        return topic, EXCHANGE_TASK, message_to_shareable(message, meta)
    raise RejectedMessage("E_KIND", "topic", f"{HELLO}, {EXCHANGE} or {SUM}", abbreviate(topic), hub)


def pack_answer(topic: str, site: str, result: Shareable) -> bytes:
    """Return the answer to a hub's question: what a site's FLARE task returned, as it would go to the server."""
    return pack_collection({"topic": topic}, [_pack_result(topic, site, result)]).tobytes()


def pack_failure(site: str, code: str) -> bytes:
    """Return the answer to a question that no task was made of."""
    return pack_collection({}, [pack_code(site, code)]).tobytes()


def _pack_result(topic: str, site: str, result: Shareable) -> Parcel:
    if topic == HELLO:
        return pack_parcel(site, {"hello": extract_hello(result)}, code="E_HELLO")
    if topic == SUM:
        answer = extract_sum_reply(result)
        return pack_code(site, answer) if isinstance(answer, str) else pack_parcel(site, {}, answer, code="E_DTYPE")
    if result.get_return_code() != ReturnCode.OK:
        return pack_reply(site, read_refusal(result, site))
    try:
        message, meta = shareable_to_message(result, site)
    except WireError as error:
        return pack_code(site, error.code)
    return pack_reply(site, SiteReply(message, meta.get("examples"), meta.get("metrics"), meta.get(EVENTS, [])))
