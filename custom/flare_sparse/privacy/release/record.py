"""What a site says of its people: a number for each declared cell, and what evaluated models got on cells.

All of a cell goes out at once, rounded by a draw that the site's secret determines. A number changes only when none or
at least the minimum of people left the cell and none or at least the minimum entered it.

Declared columns with groups of values, the cells of their cross table, and conditions decided on them alone.

A job's condition on rows is never decided by looking at rows: a cell meets it, does not, or it cannot be told.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import cast

from pydantic import BaseModel, ConfigDict, Field

from ...cohorts.conditions import Term
from ...cohorts.split import place
from ...core.names import find_number
from ..dp.secret import derive_key

FOLD = "fold"
"""Name of the column of folds, which the site's secret assigns."""
Groups = tuple[tuple[str, ...], ...] | tuple[float, ...]
"""Groups of a column: lists of texts, of which the last also holds every other value; or the edges between intervals of
numbers, of which the last also holds what is no number. So every possible value is in a group."""
Columns = Mapping[str, Groups]
Cell = Mapping[str, int]
"""Number of a cell's group by column."""
Values = Mapping[str, str]
"""Raw texts of a person by column."""


def count_groups(groups: Groups) -> int:
    """Return the number of groups of a column."""
    return len(groups) + (not is_listed(groups))


def is_listed(groups: Groups) -> bool:
    """Return whether groups, at least one, are lists of texts, and not intervals."""
    return isinstance(groups[0], tuple)


def find_group(groups: Groups, value: str) -> int:
    """Return the number of the group of a raw text; see :data:`Groups`.

    >>> find_group((("F",), ("M",)), "x"), find_group((50.0, 65.0), "50"), find_group((50.0, 65.0), "")
    (1, 1, 2)
    """
    found = find_number(value)
    if is_listed(groups):
        # A code of a job means a number, however it is spelled.
        own = {value, found} - {None}
        matches = (number for number, names in enumerate(_list_names(groups)) if not own.isdisjoint(names))
        return next(matches, len(groups) - 1)
    edges = cast("tuple[float, ...]", groups)
    return len(edges) if found is None or math.isnan(found) else bisect_right(edges, found)


@lru_cache(maxsize=256)
def _list_names(groups: Groups) -> tuple[frozenset[str | float | None], ...]:
    """Return the texts of each list, and the numbers that they spell."""
    lists = cast("tuple[tuple[str, ...], ...]", groups)
    return tuple(frozenset({*texts, *map(find_number, texts)}) for texts in lists)


def label_group(groups: Groups, number: int) -> str:
    """Return the label of a group.

    >>> label_group((("F",), ("M", "X")), 1), label_group((50.0, 65.0), 1), label_group((50.0,), 0)
    ('M or X', '50 to 65', 'below 50')
    """
    if is_listed(groups):
        return " or ".join(map(str, groups[number]))  # type: ignore[arg-type]
    if number == 0:
        return f"below {groups[0]:g}"
    return f"{groups[number - 1]:g} to {groups[number]:g}" if number < len(groups) else f"from {groups[-1]:g}"


def judge(terms: Sequence[Term], cell: Cell, columns: Columns) -> bool | None:
    """Return whether all people of a cell meet all terms, none does (False), or it cannot be told (None)."""
    found = [_judge_term(term, cell, columns) for term in terms]
    return False if False in found else None if None in found else True


def _judge_term(term: Term, cell: Cell, columns: Columns) -> bool | None:
    if term.column not in columns:
        return None
    groups, number = columns[term.column], cell[term.column]
    if not any(find_group(groups, value) == number for value in term.values):
        return not term.keeps
    # Intervals, and the last list, hold values that nobody has named.
    is_closed = is_listed(groups) and number < len(groups) - 1
    return term.keeps if is_closed and term.values.issuperset(groups[number]) else None  # type: ignore[arg-type]


def iterate_cells(columns: Columns) -> Iterator[dict[str, int]]:
    """Yield all cells of the complete cross table, empty ones included."""
    for numbers in product(*(range(count_groups(groups)) for groups in columns.values())):
        yield dict(zip(columns, numbers, strict=True))


def name_cell(cell: Cell) -> str:
    """Return the key of a cell in a record."""
    return "/".join(f"{column}={number}" for column, number in sorted(cell.items()))


def find_cell(columns: Columns, values: Values) -> dict[str, int]:
    """Return the cell of a person."""
    return {column: find_group(groups, values.get(column, "")) for column, groups in columns.items()}


def build_folds(folds: int) -> Groups:
    """Return the groups of the column of folds."""
    return tuple((str(number),) for number in range(1, folds + 1))


def assign_fold(seed: int, name: str, folds: int) -> str:
    """Return a person's fold, 1 to ``folds``: that of a stable split with this seed (cohorts/split.py)."""
    return str(int(place(f"{seed}:{name}") * folds) + 1)


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
