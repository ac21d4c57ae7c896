"""The server's side of hubs: one collection to each hub in place of a message to each of its sites, and one back.

A tree is a transport: :class:`~flare_sparse.rounds.federation.loop.Federation` sees the sites, their replies and one
sum, as without hubs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.errors import WireError
from ...privacy.secure_aggregation.rings import SectionFormat
from ...wire.collection import Parcel, pack_collection, unpack_collection
from ...wire.ledger import LedgerLine
from ..endpoints.server import Attempt, ServerEndpoint
from .census import Handshake
from .hub import HubRules
from .parcels import EXCHANGE, HELLO, SUM, SiteReply, read_code, unpack_reply
from .replies import HubReply, Reply, SumQuestions, SumReply, SumTransport, Transport

_LOG = logging.getLogger(__name__)
Wait = Callable[[], np.ndarray | None]
"""Waits for the answer of a hub; None: none came in time."""
Link = Callable[[np.ndarray, float | None], Wait | None]
"""Sends a collection to a hub, and returns at once what waits for the answer; None: without the hub, nothing was sent.

The number is that of the seconds.
"""


class Tree:
    """Carries what the federation sends to the sites of hubs through these hubs, and to the others directly.

    A hub that does not answer has sites that do not answer.

    Args:
        hubs: rules of each hub.
        links: how each hub is reached.
        endpoint: validates the replies of the sites and keeps the ledger, which receives a line per collection.
        direct: transport to the sites without a hub.
        direct_sum: the same for the steps of sums.
        direct_handshake: the same for hellos.
    """

    def __init__(
        self,
        hubs: Mapping[str, HubRules],
        links: Mapping[str, Link],
        endpoint: ServerEndpoint,
        direct: Transport,
        direct_sum: SumTransport,
        direct_handshake: Handshake,
    ):
        self.hubs, self.links, self.endpoint = hubs, links, endpoint
        self.direct, self.direct_sum, self.direct_handshake = direct, direct_sum, direct_handshake
        self._hub_of = {site: hub for hub, rules in hubs.items() for site in rules.sites}
        self._requests: dict[str, LedgerLine] = {}

    def exchange(self, attempt: Attempt) -> Mapping[str, Reply]:
        """Carry the requests of an attempt; every reply is validated here, as without hubs."""
        subject = {
            "topic": EXCHANGE,
            "kind": attempt.kind,
            "round": attempt.round,
            "sequence": attempt.sequence,
            "seconds": attempt.seconds,
        }
        direct, by_hub = self._split(attempt.messages)
        waits: dict[str, Wait] = {}
        # All hubs and the sites without one work at the same time: each collection is sent before an answer is awaited.
        for hub, messages in by_hub.items():
            collection = pack_collection(
                subject, [_acknowledge(parcel, attempt) for parcel in group_messages(messages)]
            )
            if wait := self.links[hub](collection, attempt.seconds):
                self._requests[hub] = self._record_sent(hub, collection, messages)
                waits[hub] = wait
        replies = dict(self.direct(replace(attempt, messages=direct))) if direct else {}
        for hub, wait in waits.items():
            for parcel in self._receive(hub, wait, by_hub[hub]):
                replies[parcel.sites[0]] = self._decode(parcel)
        return replies

    def exchange_sum(self, questions: SumQuestions) -> Iterator[tuple[str, SumReply]]:
        """Carry the questions of a step of a sum; the replies with values of a hub's sites are one object."""
        section = questions.section
        # The hub does not know the entries of the sum: the question says how long a section is and what it is of.
        subject = {
            "topic": SUM,
            "seconds": questions.seconds,
            "section": None if section is None else [section.wide_bytes, section.size],
            "selection": questions.selection,
        }
        direct, by_hub = self._split(questions.messages)
        waits: dict[str, Wait] = {}
        for hub, messages in by_hub.items():
            collection = pack_collection(subject, group_messages(messages))
            if wait := self.links[hub](collection, questions.seconds):
                self._record_sent(hub, collection, messages)
                waits[hub] = wait
        if direct:
            yield from self.direct_sum(replace(questions, messages=direct))
        for hub, wait in waits.items():
            for parcel in self._receive(hub, wait, by_hub[hub], section):
                answer = _unpack_answer(parcel, has_values=section is not None)
                for site in parcel.sites:
                    yield site, answer

    def shake_hands(self, sites: list[str]) -> Mapping[str, Any]:
        """Return the hello of each site that sends one, not yet validated."""
        direct, by_hub = self._split(dict.fromkeys(sites))
        waits = {
            hub: wait
            for hub, names in by_hub.items()
            if (wait := self.links[hub](pack_collection({"topic": HELLO}, [Parcel(tuple(names))]), None))
        }
        hellos = dict(self.direct_handshake(list(direct))) if direct else {}
        for hub, wait in waits.items():
            for parcel in self._await_parcels(hub, wait, by_hub[hub])[0]:
                hellos[parcel.sites[0]] = parcel.note.get("hello")
        return hellos

    def _split(self, messages: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return the messages to sites without a hub, and those to the sites of each hub in the order of its name."""
        direct = {site: message for site, message in messages.items() if site not in self._hub_of}
        by_hub: dict[str, dict[str, Any]] = {hub: {} for hub in sorted(self.hubs)}
        for site, message in messages.items():
            if site in self._hub_of:
                by_hub[self._hub_of[site]][site] = message
        return direct, {hub: part for hub, part in by_hub.items() if part}

    def _decode(self, parcel: Parcel) -> Reply:
        site, reply = parcel.sites[0], unpack_reply(parcel)
        if not isinstance(reply, SiteReply):
            return reply
        try:
            return self.endpoint.decode(site, reply.message, reply.examples, reply.metrics, reply.events)
        except WireError as error:
            return error

    def _receive(
        self, hub: str, wait: Wait, asked: Mapping[str, Any], section: SectionFormat | None = None
    ) -> list[Parcel]:
        """Return the parcels of a hub's answer, which the ledger lists."""
        parcels, size = self._await_parcels(hub, wait, asked, are_summed=section is not None)
        if size:
            self._record_received(hub, size, section if any(p.message is not None for p in parcels) else None)
        return parcels

    def _await_parcels(
        self, hub: str, wait: Wait, asked: Mapping[str, Any], *, are_summed: bool = False
    ) -> tuple[list[Parcel], int]:
        """Return the parcels of a hub's answer and its length, 0 without an answer.

        Args:
            hub: name of the hub.
            wait: waits for the answer.
            asked: sites that the collection was for; the hub speaks for no other.
            are_summed: whether a parcel may be of several sites.
        """
        try:
            answer = wait()
            if answer is None:
                _LOG.warning("hub %s did not answer in time", hub)
                return [], 0
            parcels = unpack_collection(answer, hub)[1]
        # Nothing else: the abort of a job must end it.
        except WireError as error:
            _LOG.warning("hub %s: %s", hub, error)
            return [], 0
        # One lying hub must not cost sites of others their contribution, nor count one of its own twice.
        sites = [site for parcel in parcels for site in parcel.sites]
        has_shape = are_summed or all(len(parcel.sites) == 1 for parcel in parcels)
        if not set(sites) <= asked.keys() or len(set(sites)) != len(sites) or not has_shape:
            _LOG.warning("hub %s: its answer is not one of each site asked; it is ignored", hub)
            return [], 0
        return parcels, int(answer.size)

    def _record_sent(self, hub: str, collection: np.ndarray, messages: Mapping[str, Any]) -> LedgerLine:
        """Add a line for a collection to a hub, and return it; each distinct message in it counts once."""
        first: dict[int, str] = {}
        # Equal requests share one buffer, and the collection holds each buffer once.
        for site, message in messages.items():
            first.setdefault(id(message), site)
        lines = [self._find_request(site) for site in sorted(first.values())]
        line = replace(
            lines[0],
            site=hub,
            encoding="collection",
            scalars_sent=sum(line.scalars_sent for line in lines),
            payload_bytes=int(collection.size),
            selection_bytes=sum(line.selection_bytes for line in lines),
            dense_bytes=max(line.dense_bytes for line in lines),
            floor_bytes=sum(line.floor_bytes for line in lines),
        )
        self.endpoint.ledger.lines.append(line)
        return line

    def _find_request(self, site: str) -> LedgerLine:
        """Return the newest line of a message to a site."""
        lines = reversed(self.endpoint.ledger.lines)
        return next(line for line in lines if line.site == site and line.direction == "down")

    def _record_received(self, hub: str, size: int, section: SectionFormat | None) -> None:
        """Add a line for a collection of a hub; only one with a sum holds values."""
        request = self._requests[hub]
        values = self._find_request(hub).values
        wide = section.wide_bytes if section else 0
        self.endpoint.ledger.lines.append(
            replace(
                request,
                direction="up",
                content=request.content if section else "metrics",
                values=values,
                scalars_sent=wide // 8 + (section.size - wide) // 4 if section else 0,
                payload_bytes=size,
                selection_bytes=0,
                dense_bytes=request.dense_bytes if section else 0,
                floor_bytes=section.size if section else 0,
            )
        )


def group_messages(messages: Mapping[str, np.ndarray]) -> list[Parcel]:
    """Return one parcel for each distinct message, with all sites that it is for."""
    groups: dict[int, Parcel] = {}
    for site, message in messages.items():
        sites = (*groups[id(message)].sites, site) if id(message) in groups else (site,)
        groups[id(message)] = Parcel(sites, {}, message)
    return list(groups.values())


def _acknowledge(parcel: Parcel, attempt: Attempt) -> Parcel:
    """Return a parcel with the number of the last known update of its sites."""
    # One number for most sites, so that one that missed a round does not get a copy of the request of its own.
    numbers = {site: attempt.acknowledged.get(site, 0) for site in parcel.sites}
    newest = max(numbers.values())
    late = {site: number for site, number in numbers.items() if number != newest}
    return replace(parcel, note={"acknowledged": newest, **({"late": late} if late else {})})


def _unpack_answer(parcel: Parcel, *, has_values: bool) -> SumReply:
    """Return the reply in a parcel of a hub to a step of a sum."""
    if parcel.message is None:
        return read_code(parcel.note)
    return HubReply(parcel.sites, parcel.message) if has_values else parcel.message


def sum_link_bytes(lines: Sequence[LedgerLine], hubs: Mapping[str, HubRules]) -> dict[str, dict[str, int]]:
    """Return the payload bytes that the server sent and received, and that each hub and its sites exchanged.

    Args:
        lines: lines of the ledger.
        hubs: rules of each hub.

    Returns:
        ``{"server": {"down", "up"}, hub: {"down", "up"}, ...}``; those of a hub are the messages of its sites.
    """
    hub_of = {site: hub for hub, rules in hubs.items() for site in rules.sites}
    total = {name: {"down": 0, "up": 0} for name in ("server", *sorted(hubs))}
    for line in lines:
        total[hub_of.get(line.site, "server")][line.direction] += line.payload_bytes
    return total
