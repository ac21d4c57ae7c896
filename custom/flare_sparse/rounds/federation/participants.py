"""The sites that take part in the next round, and the method configured for their capabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.errors import RoundFailed, SiteExcluded
from ...core.exchange import Assignment
from ...methods.method import Method, ask_next
from ...wire.capabilities import Capabilities
from ..endpoints.server import ServerEndpoint
from .census import Census, Handshake
from .replies import SumTransport, Transport
from .rules import Roster, RoundRules, require_min_sites

Returned = Callable[[list[str]], Collection[str]]
"""Returns those of the given quarantined sites that have sent a hello since their quarantine began."""


@dataclass(frozen=True)
class Connections:
    """How the server reaches the sites.

    Attributes:
        connected: returns the names of the sites that are connected now.
        exchange: carries requests and replies.
        exchange_sum: carries the steps of sums of padded values; None: the updates carry their values.
        handshake: requests the capabilities of sites before their first request; None: all sites have all of them.
        returned: returns those of the given quarantined sites that have sent another hello, by default none.
        on_excluded: called once per site and reason with the error that keeps a site from taking part.
    """

    connected: Callable[[], list[str]]
    exchange: Transport
    exchange_sum: SumTransport | None = None
    handshake: Handshake | None = None
    returned: Returned = lambda sites: frozenset()
    on_excluded: Callable[[SiteExcluded], None] = lambda reason: None


@dataclass(frozen=True)
class Participants:
    """The sites of one round.

    Attributes:
        method: configured for the capabilities of the sites.
        sites: sites that may receive requests.
        silent: sites that should have replied to the handshake and are not in ``sites``; they count as a miss.
        capabilities: capabilities by site that ``method`` is configured for.
    """

    method: Method[Any, Any]
    sites: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    capabilities: Mapping[str, Capabilities] = field(default_factory=dict)

    def configure(self, capabilities: Mapping[str, Capabilities]) -> Method[Any, Any]:
        """Return the method configured for ``capabilities``."""
        # Equal capabilities keep the same method object: states and assignments of a run belong to one configuration.
        return self.method if capabilities == self.capabilities else self.method.configure_for(capabilities)

    def select_available(self, roster: Roster, rules: RoundRules) -> Participants:
        """Return the participants without quarantined sites."""
        return replace(self, sites=roster.select_available(self.sites, rules))


class Admission:
    """Admits sites to rounds.

    Args:
        connections: how the server reaches the sites.
        rules: quorum and number of retries.

    Attributes:
        census: capabilities of the sites.
        seen: sites that were connected at any time.
    """

    def __init__(self, connections: Connections, rules: RoundRules):
        self.connections, self.rules = connections, rules
        self.census = Census(connections.handshake, connections.on_excluded)
        self.seen: set[str] = set()
        self._released: set[str] = set()

    def admit(self, previous: Participants, roster: Roster) -> Participants:
        """Return the participants of the next round.

        Args:
            previous: participants of the previous round.
            roster: history of the sites, which decides on quarantines.

        Raises:
            RoundFailed: too few sites can take part.
        """
        for _ in range(self.rules.retries + 1):
            connected = self.connections.connected()
            self.seen.update(connected)
            require_min_sites(connected, self.rules.min_sites)
            # Sites of another version are removed first. If they counted as available, the roster would leave out
            # quarantined sites even where too few other sites can take part.
            incompatible = self.census.find_incompatible_sites()
            roster = self._release_returned(roster, connected)
            available = roster.select_available([site for site in connected if site not in incompatible], self.rules)
            admitted = self.census.admit(available)
            if len(admitted) >= self.rules.min_sites:
                capabilities = dict(self.census.capabilities)
                silent = sorted(set(available) - set(admitted))
                return Participants(previous.configure(capabilities), admitted, silent, capabilities)
        raise RoundFailed(
            f"{len(admitted)} of {len(connected)} sites can take part, {self.rules.min_sites} are needed: "
            + "; ".join(str(reason) for _, reason in sorted(self.census.excluded.items()))
        )

    def _release_returned(self, roster: Roster, connected: Sequence[str]) -> Roster:
        """Return the roster without the quarantine of sites that have sent another hello."""
        quarantined = [site for site in connected if roster.quarantined.get(site)]
        returned = set(self.connections.returned(quarantined)) if quarantined else set()
        # Once until the site contributes: a site that is merely slow answers every hello, and would be waited for in
        # every round.
        self._released &= roster.missed.keys()
        released = returned - self._released
        self._released |= released
        remaining = {site: rounds for site, rounds in roster.quarantined.items() if site not in released}
        return replace(roster, quarantined=remaining)

    def assign(
        self, state: Any, participants: Participants, roster: Roster
    ) -> tuple[Participants, dict[str, Assignment] | None]:
        """Return the participants and their assignments in the next round; the assignments are None after the last.

        Raises:
            RoundFailed: in every attempt, no connected site had a part in the round.
        """
        for _ in range(self.rules.retries + 1):
            assignments = ask_next(participants.method, state, participants.sites)
            if assignments is None or assignments:
                return participants, assignments
            # An empty set of assignments counts as a failed attempt: other sites may be connected at the next one.
            participants = self.admit(participants, roster)
        raise RoundFailed(
            f"none of the connected sites ({', '.join(participants.sites)}) has a part in the next round of method "
            f"{participants.method.name}, in {self.rules.retries + 1} attempts: the sites that began the run must "
            "reconnect. The last committed model is intact."
        )

    def exclude_over_cap(
        self, assignments: Mapping[str, Assignment], endpoint: ServerEndpoint
    ) -> tuple[dict[str, Assignment], dict[str, SiteExcluded]]:
        """Split assignments into those within the sites' upload caps and the reasons why the others are excluded.

        Raises:
            RoundFailed: too few sites remain.
        """
        over_cap = self.census.find_sites_over_cap(assignments, endpoint)
        remaining = {site: assignment for site, assignment in assignments.items() if site not in over_cap}
        if over_cap and len(remaining) < max(1, self.rules.min_sites):
            raise RoundFailed(
                f"{len(remaining)} of {len(assignments)} sites can answer, {self.rules.min_sites} are needed: "
                + "; ".join(str(reason) for _, reason in sorted(over_cap.items()))
            )
        return remaining, over_cap
