"""Histories of jobs and withdrawals against the release, and two judges of everything that left.

``determined_by_algebra`` looks at sums over subsets that the asker knows. ``determined_by_worlds`` replays the history
in every table that the asker cannot rule out, and compares all that left, byte by byte: columns, numbers, refusals.
Both know the site's secret and see exact counts (base 1), so that rounding hides no fault of the rule. Each mutant is
the rule with one line taken out, and each of the findings P1, P2 and P4 is what left before there was a rule.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from flare_sparse.cohorts.conditions import Term
from flare_sparse.cohorts.split import SplitConfig
from flare_sparse.privacy import release
from flare_sparse.privacy.release import (
    Columns,
    ReleaseRecord,
    Rule,
    SentCell,
    count_people,
    declare,
    find_cell,
    iterate_cells,
    judge,
    name_cell,
    renew,
    round_metric,
)

SECRET = bytes(32)
N, MINIMUM = 8, 2
RULE = Rule(MINIMUM, 1)
People = dict[str, dict[str, str]]
BANDS: Columns = {"age": (tuple(map(str, range(N // 2))), tuple(map(str, range(N // 2, N))))}
DECLARED: Columns = {**BANDS, "b": (("0",), ("1",))}
World = tuple[int, ...]
DECLARATIONS: dict[tuple[type[Site], World], ReleaseRecord] = {}


def build_people(world: World) -> People:
    """Return people of ages that the asker knows, with one unknown bit each."""
    return {f"p{i}": {"age": str(i), "b": str(bit)} for i, bit in enumerate(world)}


class Site:
    """A site from its declaration on; ``left`` is all that an asker sees."""

    columns = DECLARED

    def __init__(self, world: World):
        self.people = build_people(world)
        self.record = self.declare_once(world)
        self.left: list[Any] = [sorted(self.record.columns)]
        self.subsets: list[frozenset[str]] = []

    def declare_once(self, world: World) -> ReleaseRecord:
        """Return the declaration of a world, which each history begins with."""
        key = (type(self), world)
        if key not in DECLARATIONS:
            DECLARATIONS[key] = self.declare()
        return DECLARATIONS[key]

    def declare(self) -> ReleaseRecord:
        return declare(RULE, SECRET, self.columns, self.people)

    def renew(self) -> ReleaseRecord:
        return renew(self.record, RULE, SECRET, self.people)

    def count(self, terms: Sequence[Term]) -> int | None:
        return count_people(self.record, terms)

    def measure(self, model: str, seed: int) -> float:
        """Return what a model gets, of which the asker has chosen that it is right where the bit is 1."""
        if model not in self.record.metrics:
            value = round_metric(RULE, self.evaluate(self.people), len(self.people))
            self.record = self.record.model_copy(
                update={"metrics": {**self.record.metrics, model: {"accuracy": value}}}
            )
        return self.record.metrics[model]["accuracy"]

    def evaluate(self, people: People) -> float:
        return float(np.mean([int(values["b"]) for values in people.values()])) if people else 0.0

    def find_subset(self, terms: Sequence[Term]) -> frozenset[str]:
        """Return the people whose sum an answer is."""
        columns = self.record.columns
        keys = [name_cell(cell) for cell in iterate_cells(columns) if judge(terms, cell, columns) is not False]
        return frozenset(name for key in keys for name in self.record.cells[key].people)

    def play(self, action: tuple[str, Any]) -> None:
        kind, value = action
        if kind == "count":
            self.left.append(self.count(value))
            if self.left[-1] is not None:
                self.subsets.append(self.find_subset(value))
        elif kind == "metric":
            self.left.append(self.measure(*value))
        else:
            self.people = {name: values for name, values in self.people.items() if name not in value}
            self.record = self.renew()


class EmptyCellsPublished(Site):
    def declare(self) -> ReleaseRecord:
        cells = [name_cell(find_cell(DECLARED, values)) for values in self.people.values()]
        if any(0 < cells.count(name_cell(cell)) < MINIMUM for cell in iterate_cells(DECLARED)):
            return super().declare()
        columns = dict(DECLARED)
        return ReleaseRecord(
            columns=columns,
            cells={
                key: SentCell(count=len(names), people=tuple(names))
                for key, names in release._sort(columns, self.people).items()
            },
        )


class DecidedByRows(Site):
    def count(self, terms: Sequence[Term]) -> int:
        return len(self.find_subset(terms))

    def find_subset(self, terms: Sequence[Term]) -> frozenset[str]:
        return frozenset(
            name
            for cell in self.record.cells.values()
            if any(meets(self.people[name], terms) for name in cell.people if name in self.people)
            for name in cell.people
        )


class SumWithheldAfterAWithdrawal(Site):
    def count(self, terms: Sequence[Term]) -> int | None:
        return None if any(name not in self.people for name in self.find_subset(terms)) else super().count(terms)


class RenewedAtOneChange(Site):
    def renew(self) -> ReleaseRecord:
        cells = {
            key: SentCell(count=len(names), people=tuple(names))
            for key, names in release._sort(self.record.columns, self.people).items()
        }
        return self.record.model_copy(update={"cells": cells})


class MetricComputedAnew(Site):
    def measure(self, model: str, seed: int) -> float:
        self.record = self.record.model_copy(update={"metrics": {}})
        return super().measure(model, seed)


class SplitSeedOfTheJob(Site):
    def measure(self, model: str, seed: int) -> float:
        return super().measure(f"{model} {seed}", seed)

    def evaluate(self, people: People) -> float:
        # The seed of the question, as a job's copy of it would choose the test subjects.
        chosen = SplitConfig(test=0.5).assign(people, self.seed).test
        return super().evaluate({name: people[name] for name in chosen})

    def play(self, action: tuple[str, Any]) -> None:
        self.seed = action[1][1] if action[0] == "metric" else 0
        super().play(action)


class P2ExactCounts(Site):
    """The number of examples before the rule: of the rows that a job keeps."""

    def count(self, terms: Sequence[Term]) -> int:
        return len(self.find_subset(terms))

    def find_subset(self, terms: Sequence[Term]) -> frozenset[str]:
        return frozenset(name for name, values in self.people.items() if meets(values, terms))


class P4NestedSubgroups(P2ExactCounts):
    """Subgroups before the rule: each of at least the minimum, whatever the others are."""

    def count(self, terms: Sequence[Term]) -> int | None:
        found = super().count(terms)
        return found if found >= MINIMUM else None


class P1FreeSums(P2ExactCounts):
    """Statistics before the rule: a sum of the unknown bit weighted by the server's choice."""

    def count(self, terms: Sequence[Term]) -> int:
        return sum(int(self.people[name]["b"]) for name in self.find_subset(terms))


MUTANTS: list[type[Site]] = [
    EmptyCellsPublished,
    DecidedByRows,
    SumWithheldAfterAWithdrawal,
    RenewedAtOneChange,
    MetricComputedAnew,
    SplitSeedOfTheJob,
    P1FreeSums,
    P2ExactCounts,
    P4NestedSubgroups,
]


def meets(values: dict[str, str], terms: Sequence[Term]) -> bool:
    return all((values[term.column] in term.values) == term.keeps for term in terms)


def make_history(rng: np.random.Generator) -> list[tuple[str, Any]]:
    """Return questions about one person, groups that hold him, and the unknown bit, with withdrawals between them."""
    target, actions = int(rng.integers(N)), [("count", ())]
    gone: set[int] = set()
    for _ in range(10):
        others = {int(i) for i in rng.choice(N, int(rng.integers(1, N - 2)), replace=False)}
        known = frozenset(map(str, others | {target} if rng.random() < 0.5 else {target}))
        bit, age = Term("b", frozenset("1"), bool(rng.integers(2))), Term("age", known, bool(rng.integers(2)))
        kind = rng.integers(7)
        if kind < 4:
            actions.append(("count", [(bit,), (age,), (bit, age), (age, bit)][kind]))
        elif kind < 6:
            actions.append(("metric", ("a model", int(rng.integers(50)))))
        elif len(gone) < N // 2:
            gone.add(int(rng.integers(N)) if gone else target)
            actions.append(("leave", {f"p{i}" for i in gone}))
    return actions


def determined_by_worlds(make: Callable[[World], Site], truth: World, history: list[tuple[str, Any]]) -> int:
    """Return how many bits are the same in all worlds in which the same bytes would have left."""
    alive = [(world, make(world)) for world in itertools.product((0, 1), repeat=N)]
    real = make(truth)
    alive = [(world, site) for world, site in alive if site.left == real.left]
    for action in history:
        real.play(action)
        for _, site in alive:
            site.play(action)
        # All before was equal.
        alive = [(world, site) for world, site in alive if json.dumps(site.left[-1]) == json.dumps(real.left[-1])]
    worlds = np.array([world for world, _ in alive])
    return int((worlds.min(0) == worlds.max(0)).sum())


def determined_by_algebra(subsets: Sequence[frozenset[str]]) -> int:
    """Return how many groups of fewer than the minimum have a sum that follows from sums over the subsets."""
    rows = np.array([[f"p{i}" in subset for i in range(N)] for subset in subsets], float).reshape(-1, N)
    full = np.linalg.matrix_rank(rows) if len(rows) else 0
    # A combination with support inside `few` exists exactly if the other columns have a smaller rank.
    groups = itertools.chain.from_iterable(itertools.combinations(range(N), size) for size in range(1, MINIMUM))
    return sum(bool(full) and np.linalg.matrix_rank(np.delete(rows, few, axis=1)) < full for few in groups)


def search(make: type[Site], studies: int) -> Iterator[int]:
    """Yield how many bits and sums of too few were determined in each study."""
    rng = np.random.default_rng(5)
    for _ in range(studies):
        truth, history = tuple(int(bit) for bit in rng.integers(0, 2, N)), make_history(rng)
        bits = determined_by_worlds(make, truth, history)
        site = make(truth)
        for action in history:
            site.play(action)
        yield bits + determined_by_algebra(site.subsets)


@pytest.mark.slow
@pytest.mark.parametrize("studies", [10, pytest.param(200, marks=pytest.mark.long)])
def test_nothing_about_a_person_follows_from_what_left(studies: int) -> None:
    assert sum(search(Site, studies)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_judges_find_each_mutant_and_each_finding(mutant: type[Site]) -> None:
    assert any(search(mutant, 30))
