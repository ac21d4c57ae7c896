"""Progress of a run as display text: one line per round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_bytes(count: float) -> str:
    """Format a number of bytes with decimal units: 1234567 as ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def format_progress(line: Mapping[str, Any]) -> str:
    """Format a round: contributing sites, metric of the model that the round started from, bytes and seconds.

    Args:
        line: a line of ``rounds.jsonl``.
    """
    sent = line["bytes_up"] + line["bytes_down"]
    value = line["metrics"].get(line["metric"])
    parts = [
        "final model" if line["round"] > line["rounds"] else f"round {line['round']}/{line['rounds']}",
        line["kind"] if line["kind"] not in ("train", "evaluate") else "",
        f"{len(line['sites_contributed'])}/{len(line['sites_asked'])} sites",
        "" if value is None else f"{line['metric']} {value:.3f} {line['unit']}".strip(),
        format_bytes(sent)
        + (f" ({line['dense_bytes'] / max(sent, 1):.1f}x less than dense)" if line["dense_bytes"] else ""),
        f"{line['seconds']:.1f} s",
        f"rejected: {_list_reasons(line['rejected'])}" if line["rejected"] else "",
        f"excluded: {_list_reasons(line['excluded'])}" if line.get("excluded") else "",
        f"did not reply: {', '.join(line['timed_out'])}" if line["timed_out"] else "",
        f"in quarantine: {', '.join(line['quarantined'])}" if line.get("quarantined") else "",
    ]
    return "  ".join(part for part in parts if part)


def _list_reasons(reasons: Mapping[str, str]) -> str:
    """Return each site with the code that its reason begins with."""
    return ", ".join(f"{site} {reason.partition(':')[0]}" for site, reason in sorted(reasons.items()))
