"""Markdown tables of the matrix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from page_tables import write_section

from .cell import PHASES, SUM_PHASES, TARGETS
from .damage import ENDS, WAYS
from .jobs import MASKED, METHODS

Outcomes = dict[str, list[dict[str, Any]]]


def is_broken_off(folder: Path, name: str) -> bool:
    """Return whether a cell has no outcome yet or ended with an error of the experiment."""
    file = folder / "cells" / f"{name}.json"
    return not file.is_file() or "error" in json.loads(file.read_text())


def format_verdict(outcome: dict[str, Any]) -> str:
    """Return what came out of a cell in one or a few words."""
    if "error" in outcome:
        return "broken off"
    if "checks" not in outcome:
        return "not run"
    failed = [name for name, holds in outcome["checks"].items() if not holds]
    return "not " + ", not ".join(failed) if failed else "holds"


def count_holding(outcomes: Iterable[dict[str, Any]]) -> str:
    """Return how many cells hold, of how many."""
    verdicts = [format_verdict(outcome) for outcome in outcomes]
    return f"{verdicts.count('holds')} of {len(verdicts)}"


def format_kills(
    outcomes: list[dict[str, Any]], phases: Sequence[str] = PHASES, methods: Iterable[str] = tuple(METHODS)
) -> str:
    """Return a row per process and a column per phase; a cell counts the methods and gives the longest recovery."""
    lines = ["| | " + " | ".join(phases) + " |", "| --- " * (len(phases) + 1) + "|"]
    for target in TARGETS:
        row = []
        for phase in phases:
            cells = [o for o in outcomes if (o["target"], o["phase"]) == (target, phase)]
            seconds = [
                cell["seconds"]["to recover"] + cell["seconds"]["second job"] for cell in cells if "checks" in cell
            ]
            # A table of some cells must not count the others as failed.
            if all(format_verdict(cell) == "not run" for cell in cells):
                row.append("not run")
                continue
            row.append(f"{count_holding(cells)}" + (f", {max(seconds):.0f} s" if seconds else ""))
        lines.append(f"| {target} | " + " | ".join(row) + " |")
    by_method = ", ".join(f"{m} {count_holding(o for o in outcomes if o['method'] == m)}" for m in methods)
    failures = [
        f"- {o['method']}, {o['target']}, {o['phase']}: {format_verdict(o)}"
        for o in outcomes
        if format_verdict(o) not in ("holds", "not run")
    ]
    return "\n".join([*lines, "", f"Holds: {count_holding(outcomes)} ({by_method}).", *failures]) + "\n"


def format_sums(outcomes: list[dict[str, Any]]) -> str:
    """Return the table of the kills during sums, as :func:`format_kills`."""
    return format_kills(outcomes, SUM_PHASES, MASKED)


def format_damages(outcomes: list[dict[str, Any]]) -> str:
    """Return a row per damaged end and a column per way."""
    lines = ["| | " + " | ".join(WAYS) + " |", "| --- " * (len(WAYS) + 1) + "|"]
    cells = {(outcome["ends"], outcome["way"]): outcome for outcome in outcomes}
    for ends in ENDS:
        row = []
        for way in WAYS:
            outcome = cells[ends, way]
            text = format_verdict(outcome)
            if text == "holds":
                text = "same" if outcome["same model"] else "loss reported"
            row.append(f"{text}, {outcome['method']}")
        lines.append(f"| {ends} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", f"Holds: {count_holding(outcomes)}."]) + "\n"


def format_drops(outcomes: list[dict[str, Any]]) -> str:
    """Return a row per drop."""
    lines = ["| method | cut while | the round | rounds missed | slowest round | |", "| --- " * 6 + "|"]
    for outcome in outcomes:
        how = "waits" if outcome["waits"] else "goes on"
        missed = len(outcome.get("missed", []))
        slowest = f"{outcome['slowest round']} s" if "slowest round" in outcome else ""
        lines.append(
            f"| {outcome['method']} | {outcome['phase']} | {how} | {missed} | {slowest} | {format_verdict(outcome)} |"
        )
    return "\n".join([*lines, "", f"Holds: {count_holding(outcomes)}."]) + "\n"


FORMATS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "kills": format_kills,
    "sums": format_sums,
    "damages": format_damages,
    "drops": format_drops,
}


def format_tables(outcomes: Outcomes) -> str:
    """Return the tables of the parts."""
    return "\n".join(f"## {part}\n\n{FORMATS[part](listed)}" for part, listed in outcomes.items())


def write_docs(outcomes: Outcomes) -> None:
    """Write each part's table into the page of faults."""
    for part, listed in outcomes.items():
        write_section("faults", part, FORMATS[part](listed))
