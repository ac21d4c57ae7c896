"""How a network's channels connect, and the smaller network that is left when some of them are removed."""

from __future__ import annotations

from .graph import ChannelGraph, channel_graph
from .removal import Removable, extracted, kept_units, live_mask, narrowed, own_entries, removable
from .tracing import Untraceable

__all__ = [
    "ChannelGraph",
    "Removable",
    "Untraceable",
    "channel_graph",
    "extracted",
    "kept_units",
    "live_mask",
    "narrowed",
    "own_entries",
    "removable",
]
