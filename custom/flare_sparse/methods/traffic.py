"""Bounds of the number of entries of a message that the data selects, for estimates of a run's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class MessageFacts:
    """A message of a dry run, in which noise stands for the trained values.

    Attributes:
        direction: "down" from the server to the site, "up" from the site to the server.
        kind, round: of the request that the message is or answers.
        site: name of the site.
        count: number of entries in the message of the dry run.
        selection_bytes: bytes in which the message of the dry run names its entries; 0 if the receiver knows them.
        num_sites: number of sites of the run.
        site_settings: the method's settings from the site file; None if the job's settings apply.
    """

    direction: Literal["down", "up"]
    kind: str
    round: int
    site: str
    count: int
    selection_bytes: int
    num_sites: int
    site_settings: Any = None

    def fix_count(self, reason: str) -> SelectionBounds:
        """Return the bounds where the settings fix the number of entries and the data decides which ones they are."""
        return SelectionBounds(self.count, self.count, reason)

    def keep_selection(self, reason: str) -> SelectionBounds | None:
        """Return the bounds where the count is fixed; None where the receiver already holds the selection."""
        return self.fix_count(reason) if self.selection_bytes else None


@dataclass(frozen=True)
class SelectionBounds:
    """Fewest and most entries of a message whose entries the data chooses.

    Attributes:
        least, most: bounds of the number of entries; a run need not reach them.
        reason: what the data decides, as display text.
        is_known: the receiver knows which entries they are, so that naming them needs no bytes.
    """

    least: int
    most: int
    reason: str
    is_known: bool = False
