"""Who can take part: every site is greeted before it is first asked, and what it says is what is planned with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..capabilities import Capabilities, parse_hello
from ..endpoints.server import ServerEndpoint
from ..errors import SiteExcluded
from ..exchange import Assignment

Handshake = Callable[[list[str]], Mapping[str, Any]]
"""Brings back what each site says of itself, not believed in any way; sites that stay silent are absent."""


class Census:
    """What is known of the sites that were greeted.

    A site of another version stays out for good. One that stays silent or says nonsense is greeted again before the
    next round.

    Args:
        greet: carries the hello; None: nobody is greeted, everybody takes part.
        warn: called with the reason for which a site is left out, once for each reason.

    Attributes:
        able: what the sites that may be asked can do.
        out: why sites may not be asked.
    """

    def __init__(self, handshake: Handshake | None, warn: Callable[[SiteExcluded], None]):
        self._greet, self._warn = handshake, warn
        self._said: set[tuple[str, str]] = set()
        self.capabilities: dict[str, Capabilities] = {}
        self.out: dict[str, SiteExcluded] = {}

    def incompatible_sites(self) -> set[str]:
        """Sites that are not greeted again."""
        return {site for site, why in self.out.items() if why.code == "E_VERSION"}

    def admit(self, sites: list[str]) -> list[str]:
        """The sites among these that may be asked; those who were not yet heard are greeted first."""
        if self._greet is None:
            return sites
        strangers = [site for site in sites if site not in self.capabilities and site not in self.incompatible_sites()]
        answers = self._greet(strangers) if strangers else {}
        for site in strangers:
            self._hear(site, answers)
        return [site for site in sites if site in self.capabilities]

    def _hear(self, site: str, answers: Mapping[str, Any]) -> None:
        try:
            if site not in answers:
                raise SiteExcluded("E_HELLO", site, "it did not answer the hello in time")
            self.capabilities[site] = parse_hello(answers[site], site)
            self.out.pop(site, None)
        except SiteExcluded as why:
            self.out[site] = why
            self.warn(why)

    def find_over_cap(self, requests: Mapping[str, Assignment], endpoint: ServerEndpoint) -> dict[str, SiteExcluded]:
        """Sites that may not send what they are to be asked for, and why."""
        found = {}
        for site, request in requests.items():
            able = self.capabilities.get(site)
            if able and (
                reason := able.find_violation(*endpoint.compute_min_upload(site, request), endpoint.layout.size)
            ):
                what = f"it {reason} ({request.request.kind}, round {request.request.round})"
                found[site] = SiteExcluded(
                    "E_CAP", site, f"{what}. Choose settings that send less, or raise the cap there"
                )
                self.warn(found[site])
        return found

    def warn(self, why: SiteExcluded) -> None:
        """Say so, unless it was said before."""
        if (why.site, why.code) not in self._said:
            self._said.add((why.site, why.code))
            self._warn(why)
