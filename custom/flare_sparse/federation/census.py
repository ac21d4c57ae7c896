"""Who can take part: every site is greeted before it is first asked, and what it says is what is planned with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..capabilities import Capabilities, heard
from ..endpoints.server import ServerDesk
from ..errors import LeftOut
from ..exchange import Request

Greet = Callable[[list[str]], Mapping[str, Any]]
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

    def __init__(self, greet: Greet | None, warn: Callable[[LeftOut], None]):
        self._greet, self._warn = greet, warn
        self._said: set[tuple[str, str]] = set()
        self.able: dict[str, Capabilities] = {}
        self.out: dict[str, LeftOut] = {}

    def misfits(self) -> set[str]:
        """Sites that are not greeted again."""
        return {site for site, why in self.out.items() if why.code == "E_VERSION"}

    def admitted(self, sites: list[str]) -> list[str]:
        """The sites among these that may be asked; those who were not yet heard are greeted first."""
        if self._greet is None:
            return sites
        strangers = [site for site in sites if site not in self.able and site not in self.misfits()]
        answers = self._greet(strangers) if strangers else {}
        for site in strangers:
            self._hear(site, answers)
        return [site for site in sites if site in self.able]

    def _hear(self, site: str, answers: Mapping[str, Any]) -> None:
        try:
            if site not in answers:
                raise LeftOut("E_HELLO", site, "it did not answer the hello in time")
            self.able[site] = heard(answers[site], site)
            self.out.pop(site, None)
        except LeftOut as why:
            self.out[site] = why
            self.warn(why)

    def too_much(self, requests: Mapping[str, Request], desk: ServerDesk) -> dict[str, LeftOut]:
        """Sites that may not send what they are to be asked for, and why."""
        found = {}
        for site, request in requests.items():
            able = self.able.get(site)
            if able and (reason := able.refusal(*desk.least_upload(site, request), desk.layout.size)):
                what = f"it {reason} ({request.kind}, round {request.round})"
                found[site] = LeftOut("E_CAP", site, f"{what}. Choose settings that send less, or raise the cap there")
                self.warn(found[site])
        return found

    def warn(self, why: LeftOut) -> None:
        """Say so, unless it was said before."""
        if (why.site, why.code) not in self._said:
            self._said.add((why.site, why.code))
            self._warn(why)
