"""The rounds of a run: ask, collect, check, commit, judge. The rehearsal and FLARE's controller both run this loop."""

from .census import Greet
from .loop import Federation
from .records import Best, Judgement, Outcome, RoundRecord, Snapshot
from .replies import Reply, Transport
from .rules import Rules

__all__ = [
    "Best",
    "Federation",
    "Greet",
    "Judgement",
    "Outcome",
    "Reply",
    "RoundRecord",
    "Rules",
    "Snapshot",
    "Transport",
]
