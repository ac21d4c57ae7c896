"""Figures of a soak: memory over rounds, and whether every site asked is accounted for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil

WARM_UP = 20


def measure_memory() -> dict[str, float]:
    """Return the resident memory in MB of this process and its children, by process id and name."""
    this, memory = psutil.Process(), {}
    for each in [this, *this.children(recursive=True)]:
        try:
            line = each.cmdline()
            memory[f"{each.pid} {get_name(line)}"] = each.memory_info().rss / 2**20
        except psutil.Error:
            continue
    return memory


def get_name(line: Sequence[str]) -> str:
    """Return the site in a command line, else its module or script."""
    sites = [found.group() for word in line if (found := re.search(r"site-\d+", word))]
    return sites[0] if sites else next((word for word in line if "nvflare." in word or word.endswith(".py")), "")


def fit_slopes(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return MB per round of each process that ran in all rounds after the warm-up, by least squares."""
    late = samples[WARM_UP:]
    if len(late) < 2:
        return {}
    lasting = set(late[0]).intersection(*late[1:])
    rounds = np.arange(len(late))
    return {name: float(np.polyfit(rounds, [sample[name] for sample in late], 1)[0]) for name in sorted(lasting)}


def is_balanced(line: Mapping[str, Any]) -> bool:
    """Return whether every site asked is in exactly one column of its round."""
    return (
        sorted([*line["sites_contributed"], *line["rejected"], *line["abstained"], *line["timed_out"]])
        == line["sites_asked"]
    )


def summarize(
    lines: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, float]], seconds: float
) -> dict[str, Any]:
    """Return the figures of a soak from the lines of ``rounds.jsonl`` and one memory sample for each."""
    codes = Counter(code for line in lines for code in line["rejected"].values())
    asked = sum(len(line["sites_asked"]) for line in lines)
    silent = sum(len(line["timed_out"]) for line in lines)
    slopes = fit_slopes(samples)
    return {
        "rounds": sum(line["kind"] != "evaluate" for line in lines),
        "asked": asked,
        "accepted": sum(len(line["sites_contributed"]) for line in lines),
        "rejected": dict(sorted(codes.items())),
        "timed out": silent,
        "faults": round((sum(codes.values()) + silent) / asked, 4),
        "rounds balanced": sum(is_balanced(line) for line in lines),
        "rounds recorded": len(lines),
        "processes watched": len(slopes),
        "steepest": max(slopes, key=lambda name: slopes[name]) if slopes else None,
        "steepest MB a round": round(max(slopes.values()), 4) if slopes else None,
        "peak MB of one process": round(max((max(sample.values()) for sample in samples), default=0.0)),
        "peak MB of all": round(max((sum(sample.values()) for sample in samples), default=0.0)),
        "seconds": round(seconds, 1),
    }
