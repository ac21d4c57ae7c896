"""Groups hold every possible value, and a condition is decided on them alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.cohorts.conditions import Term
from flare_sparse.cohorts.split import SplitConfig
from flare_sparse.privacy.release import (
    Columns,
    Rule,
    assign_fold,
    count_groups,
    count_people,
    declare,
    find_cell,
    find_group,
    is_union,
    judge,
    renew,
    round_count,
    round_metric,
)

COLUMNS: Columns = {"sex": (("F",), ("M", "X")), "age": (50.0, 65.0), "dx": (("a",), ("b",), ("c",))}
TEXTS = st.sampled_from(["F", "M", "X", "", "a", "b", "c", "d", "49", "50", "65", "nan", "-9", "1e400"])
TERMS = st.lists(st.builds(Term, st.sampled_from([*COLUMNS, "other"]), st.frozensets(TEXTS), st.booleans()), max_size=3)
PERSON = st.fixed_dictionaries(dict.fromkeys([*COLUMNS, "other"], TEXTS))


@given(PERSON, TERMS)
def test_a_decision_on_a_cell_holds_for_every_person_in_it(person: dict[str, str], terms: list[Term]) -> None:
    cell = find_cell(COLUMNS, person)
    assert all(0 <= number < count_groups(COLUMNS[name]) for name, number in cell.items())
    meets = all((person[term.column] in term.values) == term.keeps for term in terms)
    assert judge(terms, cell, COLUMNS) in (meets, None)


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (Term("sex", frozenset("F"), True), {0: True, 1: False}),
        # The last list holds every other value, too.
        (Term("sex", frozenset("MX"), True), {0: False, 1: None}),
        (Term("sex", frozenset("M")), {0: True, 1: None}),
        (Term("age", frozenset({"87"})), {0: True, 1: True, 2: None}),
        (Term("lab", frozenset("1")), {0: None}),
    ],
)
def test_what_the_declaration_does_not_tell_is_open(term: Term, expected: dict[int, bool | None]) -> None:
    cell = {"sex": 0, "age": 0, "dx": 0}
    assert {number: judge([term], {**cell, term.column: number}, COLUMNS) for number in expected} == expected


@given(st.integers(0, 2**64), st.text(min_size=1, max_size=8), st.integers(2, 12))
def test_folds_are_those_of_a_stable_split(seed: int, name: str, folds: int) -> None:
    fold = int(assign_fold(seed, name, folds))
    split = SplitConfig(folds=folds, fold=fold, stable=True).assign([name], seed)
    assert split.test == (name,)
    assert find_group((("F",), ("M",)), name) in (0, 1)


def build_people(women: int, men: int) -> dict[str, dict[str, str]]:
    return {f"{sex}{i}": {"sex": sex} for sex, count in (("F", women), ("M", men)) for i in range(count)}


@given(st.integers(0, 25), st.integers(0, 25))
def test_a_column_with_a_small_cell_is_left_out_as_a_whole(women: int, men: int) -> None:
    record = declare(Rule(10), b"s" * 32, {"sex": COLUMNS["sex"]}, build_people(women, men))
    assert ("sex" in record.columns) == (min(women, men) >= 10)
    assert all(cell.count >= 10 and cell.count % 5 == 0 for cell in record.cells.values())
    assert count_people(record) == sum(cell.count for cell in record.cells.values())


@pytest.mark.parametrize(("left", "entered"), [(1, 0), (9, 0), (0, 9), (10, 9), (9, 10), (5, 5)])
def test_a_cell_that_changes_by_too_few_keeps_its_number(left: int, entered: int) -> None:
    people, rule = build_people(40, 40), Rule(10, 1)
    record = declare(rule, b"s" * 32, {"sex": COLUMNS["sex"]}, people)
    changed = {name: values for number, (name, values) in enumerate(people.items()) if number >= left}
    changed |= {f"new{i}": {"sex": "F"} for i in range(entered)}
    assert renew(record, rule, b"s" * 32, changed) == record


def test_a_cell_that_changes_by_enough_is_counted_anew_and_an_emptied_one_is_not() -> None:
    rule = Rule(10, 1)
    record = declare(rule, b"s" * 32, {"sex": COLUMNS["sex"]}, build_people(40, 40))
    only_women = (Term("sex", frozenset("F"), True),)
    assert count_people(renew(record, rule, b"s" * 32, build_people(30, 40)), only_women) == 30
    assert count_people(renew(record, rule, b"s" * 32, build_people(5, 40)), only_women) == 40
    assert is_union(record, only_women)
    assert not is_union(record, (Term("age", frozenset({"87"})),))


@given(st.integers(0, 500), st.integers(0, 2**32))
def test_counts_are_multiples_near_the_count_and_the_same_again(count: int, secret: int) -> None:
    rule, key = Rule(10), secret.to_bytes(32, "big")
    found = round_count(rule, key, "cell", count)
    assert found == round_count(rule, key, "cell", count)
    assert found == 10 if count < 10 else abs(found - count) < 5 and found % 5 == 0
    # A minimum between two multiples: from it on a count is rounded.
    assert [round_count(Rule(12), key, "cell", n) for n in (0, 11)] == [12, 12]
    assert round_count(Rule(12), key, "cell", 12) in (10, 15)


def test_rounding_has_no_bias() -> None:
    found = [round_count(Rule(10), number.to_bytes(32, "big"), "cell", 52) for number in range(2000)]
    assert set(found) == {50, 55}
    assert sum(found) / len(found) == pytest.approx(52, abs=0.25)


@given(st.floats(-1e6, 1e6), st.integers(1, 5000))
def test_metrics_lie_on_a_grid_no_finer_than_the_minimum_over_n(value: float, people: int) -> None:
    step, found = 10 / max(people, 10), round_metric(Rule(10), value, people)
    assert found / step == pytest.approx(round(found / step), abs=1e-6)
    assert abs(found - value) <= step / 2 * max(1.0, abs(value)) + 1e-9
