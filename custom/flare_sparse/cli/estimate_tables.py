"""The tables of ``flare-sparse estimate``: bytes of each round, and of each link of a tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..results.runs.progress import format_bytes


def build_links_table(figures: Mapping[str, Any]) -> Table:
    """Return the table of the links; a site of a hub shows the largest bytes of one."""
    table = Table()
    table.add_column("link")
    for column in ("down", "up", "most down to a site", "most up from a site"):
        table.add_column(column, justify="right")
    hubs, per_site = figures["hubs"], figures["per_site"]
    behind_hubs = {site for sites in hubs.values() for site in sites}
    direct = [site for site in per_site if site not in behind_hubs]
    for name, size in figures["links"].items():
        sites = hubs.get(name, direct)
        with_sites = f"{len(sites)} sites" if name in hubs else f"{len(hubs)} hubs, {len(sites)} sites"
        most = [format_bytes(max(per_site[site][way] for site in sites)) if sites else "-" for way in ("down", "up")]
        table.add_row(f"{escape(name)} and {with_sites}", format_bytes(size["down"]), format_bytes(size["up"]), *most)
    return table


def build_rounds_table(figures: Mapping[str, Any]) -> Table:
    """Return the table of the rounds."""
    table = Table()
    for column in ("round", "request", "down", "up", "dense", "live"):
        table.add_column(column, justify="right")
    for line in figures["per_round"]:
        table.add_row(
            str(line["round"]),
            line["kind"],
            format_bytes(line["bytes_down"]),
            format_bytes(line["bytes_up"]),
            format_bytes(line["dense_bytes"]),
            f"{1 - line['sparsity']:.1%}",
        )
    return table
