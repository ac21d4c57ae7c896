"""The rounds of a run: ask, collect, check, commit, judge. The rehearsal and FLARE's controller both run this loop."""

from .census import Handshake
from .loop import Federation
from .records import BestModel, Evaluation, Outcome, RoundRecord, Snapshot
from .replies import Reply, Transport
from .rules import RoundRules

__all__ = [
    "BestModel",
    "Evaluation",
    "Federation",
    "Handshake",
    "Outcome",
    "Reply",
    "RoundRecord",
    "RoundRules",
    "Snapshot",
    "Transport",
]
