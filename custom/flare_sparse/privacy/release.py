"""One release for every number about people: what a site says of them in sums over cells that it declared.

A number goes out for each declared cell, and what evaluated models got on cells. All of a cell goes out at once,
rounded by a draw that the site's secret determines. A number changes only when none or at least the minimum of people
left the cell and none or at least the minimum entered it.

Cells are those of the cross table of declared columns with groups of values. A job's condition on rows is decided on
them alone and never by looking at rows: a cell meets it, does not, or it cannot be told.
"""

from __future__ import annotations

import fcntl
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..cohorts.conditions import Term
from ..cohorts.split import SplitConfig, place
from ..cohorts.subgroups import EVERYONE, SUBJECTS, parse_subgroup, split_metric
from ..core.checkpoint.writing import write_json
from ..core.errors import PolicyRefusal
from ..core.names import find_number
from .dp.secret import derive_key

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


RELEASE_FOLDER = "flare_sparse_release"
"""Folder in a site's startup kit with the secret and the record of its release."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of people that a job's messages state: sums over cells, whichever rows the job used.

    Attributes:
        train, test, validation: of the parts of the split.
        groups: of the test subjects by subgroup, such as ``sex=F``.
    """

    train: int
    test: int
    validation: int
    groups: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def count(cls, record: ReleaseRecord, split: SplitConfig, subgroups: Sequence[str]) -> Numbers:
        """Return the numbers of a split whose parts are folds of the record, or shares where it has no folds."""
        if FOLD not in record.columns:
            everyone, share = count_people(record), 1 / split.folds if split.folds else split.test
            return cls(everyone, max(round(everyone * share), 1), round(everyone * split.validation))
        parts = [
            Term(FOLD, frozenset(names), keeps=True) for names in list_folds(split, count_groups(record.columns[FOLD]))
        ]
        train, test, validation = (count_people(record, [part]) if part.values else 0 for part in parts)
        groups: dict[str, int] = {}
        for column in (parse_subgroup(text)[0] for text in subgroups):
            for number in range(count_groups(record.columns[column]) if column in record.columns else 0):
                label = f"{column}={label_group(record.columns[column], number)}"
                groups[label] = sum(
                    record.cells[name_cell(cell)].count
                    for cell in iterate_cells(record.columns)
                    if cell[column] == number and str(cell[FOLD] + 1) in parts[1].values
                )
        return cls(train, test, validation, {**groups, EVERYONE: test} if groups else {})


@dataclass(frozen=True)
class SiteRelease:
    """What a site's guards need to let numbers about people leave.

    Attributes:
        folder: the site's folder of the release.
        rule: minimum and rounding.
        numbers: what messages state.
        task: digest of the settings that its metrics depend on.
    """

    folder: Path
    rule: Rule
    numbers: Numbers
    task: str

    def state_counts(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics with the released numbers of subjects in place of the exact ones of subgroups."""
        groups = {name: part[1] for name in metrics if (part := split_metric(name)) and part[0] == SUBJECTS}
        return {**metrics, **{name: float(self.numbers.groups.get(group, 0)) for name, group in groups.items()}}

    def publish_metrics(self, metrics: Mapping[str, float], people: Mapping[str, int], model: str) -> dict[str, float]:
        """Return metrics on the grid; those of a model that left before leave again.

        Args:
            metrics: the metrics, whose counts are released numbers.
            people: number of subjects by metric, without those of subgroups.
            model: digest of the model.

        Raises:
            PolicyRefusal: the record cannot be read or written.
        """
        coarse = {name: self._round(name, value, people.get(name, 0)) for name, value in metrics.items()}
        key, released = f"{self.task}/{model}", dict[str, float]()

        def add(record: ReleaseRecord | None) -> ReleaseRecord:
            record = record or ReleaseRecord()
            known = record.metrics.get(key, {})
            released.update({name: known.get(name, value) for name, value in coarse.items()})
            return record.model_copy(update={"metrics": {**record.metrics, key: known | released}})

        update_record(self.folder, add)
        # Sort by name: subgroups come in the order of their exact counts, which would show.
        return dict(sorted(released.items()))

    def _round(self, name: str, value: float, people: int) -> float:
        metric, group = split_metric(name) or (name, "")
        if metric == SUBJECTS or (not group and not people):
            return value
        return round_metric(self.rule, value, self.numbers.groups.get(group, 0) if group else people)


def compute_step(rule: Rule, deviation: float, people: int) -> float:
    """Return the step of the grid of a figure in the unit of a column: the minimum's share of its deviation.

    >>> compute_step(Rule(10), 8.0, 80), compute_step(Rule(10), 0.0, 80)
    (1.0, 0.0)
    """
    share = deviation * rule.minimum / max(people, rule.minimum)
    return 2.0 ** math.ceil(math.log2(share)) if share > 0 else 0.0


def list_folds(split: SplitConfig, folds: int) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the folds of training, test and validation.

    Raises:
        PolicyRefusal: a part of the split is no whole number of the site's folds.
    """
    start, width = ((split.fold - 1) / split.folds, 1 / split.folds) if split.folds else (0.0, split.test)
    ends = [folds * edge for edge in (start, start + width, start + width + split.validation)]
    if any(abs(end - round(end)) > 1e-9 for end in ends):
        raise PolicyRefusal(
            f"this site's policy: release: task.split cuts the {folds} folds that this site has; choose test and "
            f"validation among multiples of 1/{folds}, and a number of folds that divides {folds}"
        )
    first, last, end = (round(edge) for edge in ends)
    parts = [frozenset(str(number % folds + 1) for number in range(*pair)) for pair in ((first, last), (last, end))]
    return frozenset(map(str, range(1, folds + 1))) - parts[0] - parts[1], parts[0], parts[1]


def update_record(folder: Path, change: Callable[[ReleaseRecord | None], ReleaseRecord]) -> ReleaseRecord:
    """Change the record in a site's folder of the release, which is locked meanwhile, and return it.

    Args:
        folder: created if missing, for the owner alone.
        change: returns the new record from the old one; None: there is none.

    Raises:
        PolicyRefusal: it cannot be read or written; then no number about people leaves.
    """
    file = folder / "release.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = ReleaseRecord.model_validate(json.loads(file.read_text())) if file.is_file() else None
            record = change(known)
            if record != known:
                file.touch(mode=0o600)
                write_json(file, record.model_dump())
                file.chmod(0o600)
            return record
    except (OSError, ValueError, ValidationError) as error:
        raise PolicyRefusal(f"{file}: the release cannot be read or written: {error}") from error
