"""The rounds of a run. Local runs and FLARE's controller both use this loop."""

from .census import Handshake
from .evaluation import BestModel, Evaluation
from .events import Event
from .hub import Hub, HubRules, RawReply, SiteLinks, SiteReply
from .loop import Federation, OnUpdates
from .progress import Snapshot
from .records import Outcome, RoundRecord
from .replies import HubReply, Reply, SumQuestions, SumReply, SumTransport, Transport
from .rules import RoundRules
from .tree import Link, Tree

__all__ = [
    "BestModel",
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
