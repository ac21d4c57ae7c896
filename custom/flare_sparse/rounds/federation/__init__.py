"""The rounds of a run. Local runs and FLARE's controller both use this loop."""

from .census import Handshake
from .evaluation import BestModel, Evaluation
from .events import Event
from .hub import FETCH_S, Hub, HubRules, SiteLinks
from .loop import Federation, OnUpdates
from .parcels import RawReply, SiteReply
from .participants import Connections
from .progress import Snapshot
from .records import Outcome, RoundRecord
from .replies import HubReply, Reply, SumQuestions, SumReply, SumTransport, Transport
from .rules import RoundRules
from .tree import Link, Tree

__all__ = [
    "FETCH_S",
    "BestModel",
    "Connections",
    "Evaluation",
    "Event",
    "Federation",
    "Handshake",
    "Hub",
    "HubReply",
    "HubRules",
    "Link",
    "OnUpdates",
    "Outcome",
    "RawReply",
    "Reply",
    "RoundRecord",
    "RoundRules",
    "SiteLinks",
    "SiteReply",
    "Snapshot",
    "SumQuestions",
    "SumReply",
    "SumTransport",
    "Transport",
    "Tree",
]
