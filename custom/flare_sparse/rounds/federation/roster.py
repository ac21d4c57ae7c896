"""Which sites can take part in the next round, and the method configured for their capabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import RoundFailed, SiteExcluded
from ...core.exchange import Assignment
from ...methods.method import Method, ask_next
from ...wire.capabilities import Capabilities, parse_hello
from ...wire.stage import Reply, StepTransport
from ..endpoints.server import Attempt, ServerEndpoint
from .rules import RoundRules, SiteHistory, require_min_sites

Transport = Callable[[Attempt], Mapping[str, Reply]]
"""Carries an attempt to its sites and returns their replies; sites that do not reply in time are absent."""


Handshake = Callable[[list[str]], Mapping[str, Any]]
"""Returns the hello of each site, not yet validated; sites that do not reply are absent."""
Returned = Callable[[list[str]], Collection[str]]
"""Returns those of the given quarantined sites that have sent a hello since their quarantine began."""


@dataclass(frozen=True)
class Connections:
    """How the server reaches the sites.

    Attributes:
        connected: returns the names of the sites that are connected now.
        exchange: carries requests and replies.
        exchange_steps: carries the steps of a stage that keeps values out of updates.
        handshake: requests the capabilities of sites before their first request; None: all sites have all of them.
        returned: returns those of the given quarantined sites that have sent another hello, by default none.
        on_excluded: called once per site and reason with the error that keeps a site from taking part.
    """

    connected: Callable[[], list[str]]
    exchange: Transport
    exchange_steps: StepTransport = lambda questions: ()
    handshake: Handshake | None = None
    returned: Returned = lambda sites: frozenset()
    on_excluded: Callable[[SiteExcluded], None] = lambda reason: None


class Roster:
    """The sites of a run: who is connected, introduces itself and takes part in the next round.

    A site introduces itself before its first request. One of another version is excluded until the end of the run. One
    that does not reply, or sends a malformed hello, is contacted again before the next round.

    Args:
        method: the method of the job.
        connections: how the server reaches the sites.
        rules: quorum and number of retries.

    Attributes:
        method: configured for the capabilities of the sites.
        sites: sites that may receive requests in the next round.
        silent: sites that should have introduced themselves and did not; they count as a miss.
        capabilities: capabilities of the sites that have introduced themselves.
        excluded: reason of each site that may not take part.
        seen: sites that were connected at any time.
    """

    def __init__(self, method: Method[Any, Any], connections: Connections, rules: RoundRules):
        self.method, self.connections, self.rules = method, connections, rules
        self.sites: list[str] = []
        self.silent: list[str] = []
        self.capabilities: dict[str, Capabilities] = {}
        self.excluded: dict[str, SiteExcluded] = {}
        self.seen: set[str] = set()
        self._configured_for: dict[str, Capabilities] = {}
        self._reported: set[tuple[str, str]] = set()
        self._released: set[str] = set()

    def admit(self, history: SiteHistory) -> None:
        """Find out which sites take part in the next round.

        Args:
            history: history of the sites, which decides on quarantines.

        Raises:
            RoundFailed: too few sites can take part.
        """
        for _ in range(self.rules.retries + 1):
            connected = self.connections.connected()
            self.seen.update(connected)
            require_min_sites(connected, self.rules.min_sites)
            # Sites of another version are removed first. If they counted as available, quarantined sites would be left
            # out even where too few other sites can take part.
            incompatible = self._find_incompatible_sites()
            history = self._release_returned(history, connected)
            available = history.select_available([site for site in connected if site not in incompatible], self.rules)
            admitted = self._introduce(available)
            if len(admitted) >= self.rules.min_sites:
                self.sites, self.silent = admitted, sorted(set(available) - set(admitted))
                # Equal capabilities keep the same method: states and assignments of a run belong to one configuration.
                if self.capabilities != self._configured_for:
                    self.method = self.method.configure_for(self.capabilities)
                    self._configured_for = dict(self.capabilities)
                return
        raise RoundFailed(
            f"{len(admitted)} of {len(connected)} sites can take part, {self.rules.min_sites} are needed: "
            + "; ".join(str(reason) for _, reason in sorted(self.excluded.items()))
        )

    def assign(self, state: Any, history: SiteHistory) -> dict[str, Assignment] | None:
        """Return the assignments of the next round; None after the last.

        Raises:
            RoundFailed: in every attempt, no connected site had a part in the round.
        """
        for _ in range(self.rules.retries + 1):
            assignments = ask_next(self.method, state, self.sites)
            if assignments is None or assignments:
                return assignments
            # An empty set of assignments counts as a failed attempt: other sites may be connected at the next one.
            self.admit(history)
        raise RoundFailed(
            f"none of the connected sites ({', '.join(self.sites)}) has a part in the next round of method "
            f"{self.method.name}, in {self.rules.retries + 1} attempts: the sites that began the run must reconnect. "
            "The last committed model is intact."
        )

    def exclude_over_cap(
        self, assignments: Mapping[str, Assignment], endpoint: ServerEndpoint
    ) -> tuple[dict[str, Assignment], dict[str, SiteExcluded]]:
        """Split assignments into those within the sites' upload caps and the reasons why the others are excluded.

        Args:
            assignments: by site.
            endpoint: computes the size of the smallest valid update.

        Raises:
            RoundFailed: too few sites remain.
        """
        over_cap = {}
        for site, assignment in assignments.items():
            capabilities = self.capabilities.get(site)
            # Without a handshake the cap is unknown: the site receives the request, and its own policy decides.
            if capabilities is None:
                continue
            smallest = endpoint.compute_min_upload(site, assignment)
            if violation := capabilities.find_violation(*smallest, endpoint.layout.size):
                text = f"it {violation} ({assignment.request.kind}, round {assignment.request.round})"
                remedy = f"{text}. Choose settings that send less, or raise the site's cap"
                over_cap[site] = SiteExcluded("E_CAP", site, remedy)
                self._report_once(over_cap[site])
        remaining = {site: assignment for site, assignment in assignments.items() if site not in over_cap}
        if over_cap and len(remaining) < max(1, self.rules.min_sites):
            raise RoundFailed(
                f"{len(remaining)} of {len(assignments)} sites can answer, {self.rules.min_sites} are needed: "
                + "; ".join(str(reason) for _, reason in sorted(over_cap.items()))
            )
        return remaining, over_cap

    def _find_incompatible_sites(self) -> set[str]:
        return {site for site, reason in self.excluded.items() if reason.code == "E_VERSION"}

    def _introduce(self, sites: list[str]) -> list[str]:
        """Return those of ``sites`` that may receive requests, after a handshake with the unknown ones."""
        handshake = self.connections.handshake
        if handshake is None:
            return sites
        # A version does not change while a job runs: only missing and malformed hellos are worth another handshake.
        incompatible = self._find_incompatible_sites()
        unknown = [site for site in sites if site not in self.capabilities and site not in incompatible]
        hellos = handshake(unknown) if unknown else {}
        for site in unknown:
            self._record_hello(site, hellos)
        return [site for site in sites if site in self.capabilities]

    def _record_hello(self, site: str, hellos: Mapping[str, Any]) -> None:
        try:
            if site not in hellos:
                raise SiteExcluded("E_HELLO", site, "it did not reply to the handshake in time")
            self.capabilities[site] = parse_hello(hellos[site], site)
            self.excluded.pop(site, None)
        except SiteExcluded as reason:
            self.excluded[site] = reason
            self._report_once(reason)

    def _report_once(self, reason: SiteExcluded) -> None:
        # A silent site is contacted before every round; one line in the log is enough.
        if (reason.site, reason.code) not in self._reported:
            self._reported.add((reason.site, reason.code))
            self.connections.on_excluded(reason)

    def _release_returned(self, history: SiteHistory, connected: Sequence[str]) -> SiteHistory:
        """Return the history without the quarantine of sites that have sent another hello."""
        quarantined = [site for site in connected if history.quarantined.get(site)]
        returned = set(self.connections.returned(quarantined)) if quarantined else set()
        # Release a site once until it contributes: one that is merely slow answers every hello, and would delay
        # every round.
        self._released &= history.missed.keys()
        released = returned - self._released
        self._released |= released
        remaining = {site: rounds for site, rounds in history.quarantined.items() if site not in released}
        return replace(history, quarantined=remaining)
