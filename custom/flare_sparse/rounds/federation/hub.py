"""A hub: it stands between the server and some of the sites, and adds the fixed-point values of their replies.

Integers of a ring add associatively (:mod:`~flare_sparse.privacy.secure_aggregation.rings`), so sums of sums have
the bits of the sum over all sites. A hub keeps nothing from one question to the next: what a site holds, owes and has
missed is known at the server alone, and a hub that restarts has lost no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import RejectedMessage, WireError
from ...privacy.secure_aggregation.messages import FINGERPRINT_BYTES, pack_message, unpack_message
from ...privacy.secure_aggregation.pads import read_sum_id
from ...privacy.secure_aggregation.rings import SectionFormat
from ...wire.collection import Parcel, pack_collection, unpack_collection
from ..endpoints.server import Attempt
from .parcels import EXCHANGE, HELLO, SUM, RawReply, pack_code, pack_parcel, pack_reply, read_attempt, read_questions
from .replies import SumQuestions

FETCH_S = 60.0
"""Default of the seconds in which a site fetches a question from its hub; it asks again after at most 10."""


@dataclass(frozen=True)
class HubRules:
    """What a job says of one hub.

    Attributes:
        sites: names of its sites.
        min_sites: quorum of the hub: with values of fewer sites, it passes none on.
        fetch_s: seconds in which a site fetches a question, before the hub goes on without it.
    """

    sites: tuple[str, ...]
    min_sites: int = 1
    fetch_s: float = FETCH_S


@dataclass(frozen=True)
class SiteLinks:
    """How a hub reaches its sites. Sites that do not reply in time are absent from what is returned.

    Attributes:
        exchange: carries the requests of an attempt.
        exchange_sum: carries the questions of a step of a sum; returns messages and reason codes.
        handshake: requests the hellos of sites.
    """

    exchange: Callable[[Attempt], Mapping[str, RawReply]]
    exchange_sum: Callable[[SumQuestions], Mapping[str, np.ndarray | str]]
    handshake: Callable[[list[str]], Mapping[str, Any]]


class Hub:
    """Answers the collections of the server.

    Args:
        rules: the hub's sites and its quorum.
        links: how the hub reaches its sites.
    """

    def __init__(self, rules: HubRules, links: SiteLinks):
        self.rules, self.links = rules, links

    def answer(self, data: Any) -> np.ndarray:
        """Pass the parcels of a collection on, and return one collection with the replies that arrive in time.

        Raises:
            RejectedMessage: the collection is malformed, or has a parcel for a site that is not this hub's.
        """
        subject, parcels = unpack_collection(data, "server")
        sites = [site for parcel in parcels for site in parcel.sites]
        # The site list of the job counts: a server must not make this hub speak to sites that are not its own.
        if not set(sites) <= set(self.rules.sites) or len(set(sites)) != len(sites):
            raise RejectedMessage("E_KIND", "sites", f"some of {sorted(self.rules.sites)}, once", sites, "server")
        topic = subject.get("topic")
        if topic == HELLO:
            hellos = self.links.handshake(sites)
            # The server excludes a site without a hello, as one whose hello is malformed.
            packed = [pack_parcel(site, {"hello": hello}, code="E_HELLO") for site, hello in sorted(hellos.items())]
            return pack_collection(subject, packed)
        if topic == EXCHANGE:
            replies = self.links.exchange(read_attempt(subject, parcels))
            return pack_collection(subject, [pack_reply(site, reply) for site, reply in sorted(replies.items())])
        if topic == SUM:
            questions = read_questions(subject, parcels)
            answers = self.links.exchange_sum(questions)
            section = questions.section
            passed_on = _list_answers(answers) if section is None else self._add_answers(questions, section, answers)
            return pack_collection(subject, passed_on)
        raise RejectedMessage("E_KIND", "topic", f"{HELLO}, {EXCHANGE} or {SUM}", topic, "server")

    def _add_answers(
        self, questions: SumQuestions, section: SectionFormat, answers: Mapping[str, np.ndarray | str]
    ) -> list[Parcel]:
        """Return one parcel with the sum of the sites' values, and the reason codes of the sites that are not in it."""
        total = np.zeros(section.size, np.uint8)
        codes: dict[str, str] = {}
        added: list[str] = []
        for site, answer in sorted(answers.items()):
            if isinstance(answer, str):
                codes[site] = answer
                continue
            try:
                section.add(total, _read_section(answer, site, questions, section))
                added.append(site)
            except WireError as error:
                codes[site] = error.code
        # A sum over too few sites never leaves the hub, whatever the server would make of it.
        if len(added) < max(1, self.rules.min_sites):
            codes.update(dict.fromkeys(added, "E_QUORUM"))
            added = []
        parcels = [pack_code(site, code) for site, code in sorted(codes.items())]
        if added:
            step, sum_id, _ = unpack_message(questions.messages[added[0]], "server")
            content = bytes.fromhex(questions.selection) + total.tobytes()
            parcels.append(Parcel(tuple(added), {}, pack_message(step, read_sum_id(sum_id), content)))
        return parcels


def _list_answers(answers: Mapping[str, np.ndarray | str]) -> list[Parcel]:
    """Return a parcel for each site's reply to a step of a sum."""
    return [
        pack_code(site, answer) if isinstance(answer, str) else pack_parcel(site, {}, answer, code="E_DTYPE")
        for site, answer in sorted(answers.items())
    ]


def _read_section(answer: np.ndarray, site: str, questions: SumQuestions, section: SectionFormat) -> np.ndarray:
    """Return the values, uint8 ``(section.size,)``, in a site's reply, which is not trusted.

    Raises:
        RejectedMessage: the message is malformed, or of another sum, other entries or another length.
    """
    step, sum_id, payload = unpack_message(answer, site)
    expected = unpack_message(questions.messages[site], "server")[:2]
    if (step, sum_id) != expected:
        raise RejectedMessage("E_REPLAY", "step, sum", expected[0].name, step.name, site)
    # Checked here and not at the server: once added, a wrong reply would spoil the sum of all sites of the hub.
    if len(payload) != FINGERPRINT_BYTES + section.size:
        raise RejectedMessage("E_LEN", "values", FINGERPRINT_BYTES + section.size, len(payload), site)
    if payload[:FINGERPRINT_BYTES].hex() != questions.selection:
        raise RejectedMessage("E_MASK", "selection", questions.selection, payload[:FINGERPRINT_BYTES].hex(), site)
    return np.frombuffer(payload[FINGERPRINT_BYTES:], np.uint8)
