"""Declared columns with groups of values, the cells of their cross table, and conditions decided on them alone.

A job's condition on rows is never decided by looking at rows: a cell meets it, does not, or it cannot be told.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import cast

from ...cohorts.conditions import Term
from ...cohorts.split import place
from ...core.names import find_number

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
