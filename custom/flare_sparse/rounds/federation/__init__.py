"""The rounds of a run. Local runs and FLARE's controller both use this loop."""

from .events import Event
from .loop import Federation
from .records import BestModel, Evaluation, Outcome, Participation, RoundRecord
from .roster import Connections, Handshake, Transport
from .rules import RoundRules

__all__ = [
    "BestModel",
    "Connections",
    "Evaluation",
    "Event",
    "Federation",
    "Handshake",
    "Outcome",
    "Participation",
    "RoundRecord",
    "RoundRules",
    "Transport",
]
