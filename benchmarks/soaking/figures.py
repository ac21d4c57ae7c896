"""Memory over rounds, and whether every site that was asked is accounted for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil

WARM_UP = 20


def resident_mb() -> dict[str, float]:
    """Resident memory in MB of this process and of all that it started, by process id and what it runs."""
    this, found = psutil.Process(), {}
    for each in [this, *this.children(recursive=True)]:
        try:
            line = each.cmdline()
            found[f"{each.pid} {named(line)}"] = each.memory_info().rss / 2**20
        except psutil.Error:
            continue
    return found


def named(line: Sequence[str]) -> str:
    """The site that a command line speaks of, or else its module or script."""
    sites = [found.group() for word in line if (found := re.search(r"site-\d+", word))]
    return sites[0] if sites else next((word for word in line if "nvflare." in word or word.endswith(".py")), "")


def slopes(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """MB a round by process, least squares over the rounds after the warm-up; processes that lived through them all."""
    late = samples[WARM_UP:]
    if len(late) < 2:
        return {}
    lasting = set(late[0]).intersection(*late[1:])
    rounds = np.arange(len(late))
    return {name: float(np.polyfit(rounds, [sample[name] for sample in late], 1)[0]) for name in sorted(lasting)}


def balanced(line: Mapping[str, Any]) -> bool:
    """Every site that was asked is in exactly one column of its round."""
    return (
        sorted([*line["sites_contributed"], *line["rejected"], *line["abstained"], *line["timed_out"]])
        == line["sites_asked"]
    )


def figures(
    lines: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, float]], seconds: float
) -> dict[str, Any]:
    """What a soak is judged by; ``lines`` as in ``rounds.jsonl``, ``samples`` one for each."""
    codes = Counter(code for line in lines for code in line["rejected"].values())
    asked = sum(len(line["sites_asked"]) for line in lines)
    silent = sum(len(line["timed_out"]) for line in lines)
    grown = slopes(samples)
    return {
        "rounds": sum(line["kind"] != "evaluate" for line in lines),
        "asked": asked,
        "accepted": sum(len(line["sites_contributed"]) for line in lines),
        "rejected": dict(sorted(codes.items())),
        "timed out": silent,
        "faults": round((sum(codes.values()) + silent) / asked, 4),
        "rounds balanced": sum(balanced(line) for line in lines),
        "rounds recorded": len(lines),
        "processes watched": len(grown),
        "steepest": max(grown, key=lambda name: grown[name]) if grown else None,
        "steepest MB a round": round(max(grown.values()), 4) if grown else None,
        "peak MB of one process": round(max((max(sample.values()) for sample in samples), default=0.0)),
        "peak MB of all": round(max((sum(sample.values()) for sample in samples), default=0.0)),
        "seconds": round(seconds, 1),
    }
