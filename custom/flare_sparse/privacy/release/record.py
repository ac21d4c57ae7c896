"""What a site says of its people: a number for each declared cell, and what evaluated models got on cells.

All of a cell goes out at once, rounded by a draw that the site's secret determines. A number changes only when none or
at least the minimum of people left the cell and none or at least the minimum entered it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from ...cohorts.conditions import Term
from ..dp.secret import derive_key
from .cells import Columns, Groups, Values, find_cell, iterate_cells, judge, name_cell

People = Mapping[str, Values]
"""Raw texts of each person by identifier; their fold among them."""


@dataclass(frozen=True)
class Rule:
    """How numbers about people leave.

    Attributes:
        minimum: fewest people of a cell.
        base: numbers are multiples of it; 1: exact.
    """

    minimum: int
    base: int = 5


class SentCell(BaseModel):
    """The number of a cell that goes out, and the people that it was counted from, who stay here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(ge=0)
    people: tuple[str, ...] = ()


class ReleaseRecord(BaseModel):
    """The release of a site, for life: it survives jobs and restarts.

    Attributes:
        columns: declared columns that are in the cells.
        cells: by key of the cell.
        metrics: metrics that left, by task and model.
        answers: answers to questions about columns that left, by the digest of the question.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    columns: dict[str, Groups] = Field(default_factory=dict)
    cells: dict[str, SentCell] = Field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = Field(default_factory=dict)
    answers: dict[str, str] = Field(default_factory=dict)


def declare(rule: Rule, secret: bytes, columns: Columns, people: People) -> ReleaseRecord:
    """Return the release of a declaration; without any column it has one cell, everybody.

    A column is accepted only if every cell of the complete cross table with those before it holds the minimum; an empty
    cell is too small. Otherwise it is left out as a whole.
    """
    accepted: dict[str, Groups] = {}
    for name, groups in columns.items():
        tried = {**accepted, name: groups}
        if all(len(names) >= rule.minimum for names in _sort(tried, people).values()):
            accepted = tried
    cells = {key: _publish(rule, secret, key, names) for key, names in _sort(accepted, people).items()}
    return ReleaseRecord(columns=accepted, cells=cells)


def renew(record: ReleaseRecord, rule: Rule, secret: bytes, people: People) -> ReleaseRecord:
    """Return the release after people left and entered; a cell that changed by too few keeps what went out."""
    cells = dict(record.cells)
    for key, names in _sort(record.columns, people).items():
        before, now = set(record.cells[key].people), set(names)
        changes = len(before - now), len(now - before)
        if len(now) >= rule.minimum and all(not change or change >= rule.minimum for change in changes):
            cells[key] = _publish(rule, secret, key, names)
    return record.model_copy(update={"cells": cells})


def count_people(record: ReleaseRecord, terms: Sequence[Term] = ()) -> int:
    """Return the sum over the cells whose people meet the terms, or may: the answer to a job's condition."""
    return sum(
        record.cells[name_cell(cell)].count
        for cell in iterate_cells(record.columns)
        if judge(terms, cell, record.columns) is not False
    )


def is_union(record: ReleaseRecord, terms: Sequence[Term]) -> bool:
    """Return whether the people who meet the terms are whole cells, as far as the declaration tells."""
    return all(judge(terms, cell, record.columns) is not None for cell in iterate_cells(record.columns))


def round_metric(rule: Rule, value: float, people: int) -> float:
    """Return a metric on a grid no finer than what the minimum of people can move it by: minimum over n.

    Above 1 the grid grows with the number's power of two, as that of a float.

    >>> round_metric(Rule(10), 0.874, 40), round_metric(Rule(10), 5.3, 40)
    (0.75, 5.0)
    """
    if not math.isfinite(value):
        return value
    step = rule.minimum / max(people, rule.minimum) * 2.0 ** max(0, math.floor(math.log2(max(abs(value), 1.0))))
    # The exact product may be a hair off the grid, whose digits would then tell nothing but length.
    return round(round(value / step) * step, 12)


def round_count(rule: Rule, secret: bytes, key: str, count: int) -> int:
    """Return a count up or down to a multiple of the base by chance, without bias; the same each time it is asked for.

    Below the minimum it is the minimum, whatever the count.
    """
    if count < rule.minimum:
        return rule.minimum
    chance = int.from_bytes(derive_key(secret, "release", key, count)[:8], "little") / 2.0**64
    return rule.base * (count // rule.base + (chance < count % rule.base / rule.base))


def _sort(columns: Columns, people: People) -> dict[str, list[str]]:
    """Return the people of each cell, empty ones included, by its key."""
    cells: dict[str, list[str]] = {name_cell(cell): [] for cell in iterate_cells(columns)}
    for name in sorted(people):
        cells[name_cell(find_cell(columns, people[name]))].append(name)
    return cells


def _publish(rule: Rule, secret: bytes, key: str, names: Iterable[str]) -> SentCell:
    people = tuple(names)
    return SentCell(count=round_count(rule, secret, key, len(people)), people=people)
