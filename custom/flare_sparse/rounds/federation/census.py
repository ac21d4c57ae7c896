"""Which sites can take part: each site introduces itself before its first request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...core.errors import SiteExcluded
from ...core.exchange import Assignment
from ...wire.capabilities import Capabilities, parse_hello
from ..endpoints.server import ServerEndpoint

Handshake = Callable[[list[str]], Mapping[str, Any]]
"""Returns the hello of each site, not yet validated; sites that do not reply are absent."""


class Census:
    """The capabilities of the sites of a run.

    A site of another version is excluded until the end of the run. A site that does not reply, or sends a malformed
    hello, is contacted again before the next round.

    Args:
        handshake: asks sites for their hello; None: all sites take part, with all capabilities.
        on_excluded: called once per site and reason with the error that excludes the site.

    Attributes:
        capabilities: capabilities of the sites that may receive requests, by site.
        excluded: reason of each site that may not.
    """

    def __init__(self, handshake: Handshake | None, on_excluded: Callable[[SiteExcluded], None]):
        self._handshake, self._on_excluded = handshake, on_excluded
        self._reported: set[tuple[str, str]] = set()
        self.capabilities: dict[str, Capabilities] = {}
        self.excluded: dict[str, SiteExcluded] = {}

    def find_incompatible_sites(self) -> set[str]:
        """Return the sites that are excluded until the end of the run."""
        return {site for site, reason in self.excluded.items() if reason.code == "E_VERSION"}

    def admit(self, sites: list[str]) -> list[str]:
        """Return those of ``sites`` that may receive requests, after a handshake with the unknown ones."""
        if self._handshake is None:
            return sites
        # A version does not change while a job runs: only missing and malformed hellos are worth another handshake.
        incompatible = self.find_incompatible_sites()
        unknown = [site for site in sites if site not in self.capabilities and site not in incompatible]
        hellos = self._handshake(unknown) if unknown else {}
        for site in unknown:
            self._record_hello(site, hellos)
        return [site for site in sites if site in self.capabilities]

    def find_sites_over_cap(
        self, assignments: Mapping[str, Assignment], endpoint: ServerEndpoint
    ) -> dict[str, SiteExcluded]:
        """Return the reason for each site with an upload cap below the size of its smallest valid update.

        Args:
            assignments: by site.
            endpoint: computes the size of the smallest update.
        """
        excluded = {}
        for site, assignment in assignments.items():
            capabilities = self.capabilities.get(site)
            # Without a handshake the cap is unknown: the site receives the request, and its own policy decides.
            if capabilities is None:
                continue
            smallest = endpoint.compute_min_upload(site, assignment)
            if violation := capabilities.find_violation(*smallest, endpoint.layout.size):
                text = f"it {violation} ({assignment.request.kind}, round {assignment.request.round})"
                excluded[site] = SiteExcluded(
                    "E_CAP", site, f"{text}. Choose settings that send less, or raise the site's cap"
                )
                self._report_once(excluded[site])
        return excluded

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
            self._on_excluded(reason)
