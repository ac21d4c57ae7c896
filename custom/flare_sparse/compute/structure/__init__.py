"""Channel graphs of networks, and the smaller networks that remain when units or channels are removed."""

from .graph import ChannelGraph, build_channel_graph
from .removal import (
    RemovableLayer,
    build_live_mask,
    extract_network,
    find_removable_layers,
    get_kept_units,
    locate_unit_entries,
    narrow_network,
)
from .tracing import Untraceable

__all__ = [
    "ChannelGraph",
    "RemovableLayer",
    "Untraceable",
    "build_channel_graph",
    "build_live_mask",
    "extract_network",
    "find_removable_layers",
    "get_kept_units",
    "locate_unit_entries",
    "narrow_network",
]
