"""One readable line a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def human_bytes(count: float) -> str:
    """``1234567`` -> ``"1.2 MB"`` (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def progress_line(line: Mapping[str, Any]) -> str:
    """Round, sites in, metric of the model that the round started from, bytes, seconds.

    Args:
        line: a line of ``rounds.jsonl``.
    """
    sent = line["bytes_up"] + line["bytes_down"]
    figure = line["metrics"].get(line["metric"])
    parts = [
        "final model" if line["round"] > line["rounds"] else f"round {line['round']}/{line['rounds']}",
        line["kind"] if line["kind"] not in ("train", "evaluate") else "",
        f"{len(line['sites_contributed'])}/{len(line['sites_asked'])} sites",
        "" if figure is None else f"{line['metric']} {figure:.3f} {line['unit']}".strip(),
        human_bytes(sent)
        + (f" ({line['dense_bytes'] / max(sent, 1):.1f}x less than dense)" if line["dense_bytes"] else ""),
        f"{line['seconds']:.1f} s",
        f"left out: {line['rejected']}" if line["rejected"] else "",
        f"not asked: {_codes(line['excluded'])}" if line.get("excluded") else "",
        f"no answer: {', '.join(line['timed_out'])}" if line["timed_out"] else "",
    ]
    return "  ".join(part for part in parts if part)


def _codes(reasons: Mapping[str, str]) -> dict[str, str]:
    """By site, the code that a reason begins with."""
    return {site: why.split(":")[0] for site, why in reasons.items()}
