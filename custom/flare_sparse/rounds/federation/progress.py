"""State of a run at its last commit, in memory and in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ...wire.ledger import LedgerLine
from ..endpoints.server import ServerSnapshot
from .evaluation import BestModel
from .records import RoundRecord
from .rules import SiteHistory

S = TypeVar("S")


@dataclass(frozen=True)
class Snapshot(Generic[S]):
    """The server's checkpoint: all that a run needs to continue from a commit with the same result.

    Attributes:
        state: the method's state.
        committed: last committed round.
        best: best model so far.
        history: history of the sites.
        endpoint: snapshot of the server's endpoint.
        records: records of all rounds.
        messages: lines of the ledger.
    """

    state: S
    committed: int
    best: BestModel
    history: SiteHistory
    endpoint: ServerSnapshot
    records: list[RoundRecord]
    messages: list[LedgerLine]


@dataclass(frozen=True)
class Progress:
    """State of a run at its last commit.

    Attributes:
        state: the method's state.
        committed: last committed round; 0: none.
        best: best model so far.
        history: history of the sites.
        records: records of all rounds.
    """

    state: Any
    committed: int = 0
    best: BestModel = field(default_factory=BestModel)
    history: SiteHistory = field(default_factory=SiteHistory)
    records: tuple[RoundRecord, ...] = ()

    def to_snapshot(self, endpoint: ServerSnapshot, messages: Sequence[LedgerLine]) -> Snapshot[Any]:
        """Return the content of a checkpoint.

        Args:
            endpoint: snapshot of the server's endpoint.
            messages: lines of the ledger.
        """
        return Snapshot(
            self.state, self.committed, self.best, self.history, endpoint, list(self.records), list(messages)
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot[Any]) -> Progress:
        """Return the progress saved in a checkpoint."""
        return cls(snapshot.state, snapshot.committed, snapshot.best, snapshot.history, tuple(snapshot.records))
