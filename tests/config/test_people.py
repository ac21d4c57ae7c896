"""A site declares its people once; what a job's messages say of them follows from that alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import parse_job
from flare_sparse.config.people import PEOPLE_FILE, Declaration, ReleaseGate, propose, read_declaration
from flare_sparse.core.errors import DataError, PolicyRefusal
from flare_sparse.privacy.release import Rule
from flare_sparse.tasks.data.tables import read_table
from flare_sparse.tasks.task import SiteData
from flare_sparse.training import Site

COLUMNS = {"sex": [["F"], ["M"]], "age": [60]}


def write_table(folder: Path, people: int = 240) -> Path:
    rng = np.random.default_rng(4)
    ages, labs = rng.integers(40, 85, people), rng.normal(6, 1, people).round(1)
    ages[min(77, people - 1)] = 87
    rows = (f"p{i},{ages[i]},{'FM'[i % 2]},{i % 4},{labs[i]},{rng.normal():.3f}\n" for i in range(people))
    (folder / "patients.csv").write_text("id,age,sex,dx,lab,y\n" + "".join(rows))
    return folder / "patients.csv"


def open_job(
    folder: Path,
    *,
    declared: dict[str, Any] | None,
    withdrawn: frozenset[str] = frozenset(),
    seed: int = 1,
    **task: Any,
) -> Site:
    """Open a site for a job under a minimum of 10; its release lies in the folder from job to job."""
    (folder / "local").mkdir(exist_ok=True)
    (folder / "local" / PEOPLE_FILE).unlink(missing_ok=True)
    if declared is not None:
        content = {"id": "id", "table": str(folder / "patients.csv"), **declared}
        (folder / "local" / PEOPLE_FILE).write_text(yaml.safe_dump(content))
    settings = {"name": "table", "kind": "regression", "target": "y", "features": ["age", "lab"], "id": "id"}
    job = parse_job(
        {"name": "study", "seed": seed, "method": {"name": "fedavg", "rounds": 1}, "task": {**settings, **task}}
    )
    gate = ReleaseGate(folder / "local", folder / "release", Rule(10))
    return open_site(assemble(job), SiteData("site", folder / "patients.csv", withdrawn=withdrawn, id="id"), gate=gate)


def list_numbers(site: Site) -> tuple[int, int, int]:
    assert site.release is not None
    numbers = site.release.numbers
    assert site.num_examples == numbers.train
    return numbers.train, numbers.test, numbers.validation


@pytest.mark.parametrize("declared", [None, {"columns": COLUMNS}])
def test_numbers_are_rounded_and_no_job_changes_them(tmp_path: Path, declared: dict[str, Any] | None) -> None:
    """P2: 20 jobs asked by the number of examples for diagnosis and laboratory value of a known patient."""
    write_table(tmp_path)
    first = list_numbers(open_job(tmp_path, declared=declared))
    assert all(number % 5 == 0 or declared is None for number in first)
    assert abs(first[0] - (240 if declared is None else 192)) < 25
    codes = ({"dx": [value]} for value in range(4)), ({"lab": [5.8]}, {"dx": [1], "lab": [5.8]})
    for choice in (code for part in codes for code in part):
        # Filled in: rows stay, and the number too, whatever the seed is.
        site = open_job(
            tmp_path, declared=declared, missing_codes=choice, missing="impute", features=["age", "lab", "dx"], seed=7
        )
        assert list_numbers(site) == first
        with pytest.raises(PolicyRefusal, match="no union"):
            open_job(
                tmp_path, declared=declared, missing_codes=choice, features=["age", "lab", "dx"], skip_bad_subjects=True
            )


@pytest.mark.parametrize("rows", [{"dx": ["2"]}, {"age": ["61"]}, {"lab": ["5.8"]}])
def test_rows_that_a_job_asks_for_must_be_declared_cells(tmp_path: Path, rows: dict[str, Any]) -> None:
    write_table(tmp_path)
    for declared in (None, {"columns": COLUMNS}):
        with pytest.raises(PolicyRefusal, match=r"the job chooses rows by their values of .* no union"):
            open_job(tmp_path, declared=declared, rows=rows)


def test_withdrawal_of_too_few_changes_no_number_and_their_rows_are_gone(tmp_path: Path) -> None:
    write_table(tmp_path)
    declared = {"columns": COLUMNS}
    first = open_job(tmp_path, declared=declared)
    gone = open_job(tmp_path, declared=declared, withdrawn=frozenset({"p77", "p3"}))
    assert list_numbers(gone) == list_numbers(first)
    used = {*gone.trainer.examples.train_ids, *gone.trainer.examples.test_ids}
    assert used == {f"p{i}" for i in range(240)} - {"p77", "p3"}
    half = open_job(tmp_path, declared=declared, withdrawn=frozenset(f"p{i}" for i in range(120)))
    assert list_numbers(half)[0] < 150


def test_split_is_the_site_s_and_a_job_picks_folds(tmp_path: Path) -> None:
    write_table(tmp_path)
    declared = {"columns": COLUMNS}
    tests = [
        set(
            open_job(tmp_path, declared=declared, seed=seed, split={"folds": 5, "fold": fold}).trainer.examples.test_ids
        )
        for seed, fold in ((1, 1), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5))
    ]
    assert tests[0] == tests[1]
    assert sum(map(len, tests[1:])) == len(set.union(*tests)) == 240
    for split in ({"test": 0.205}, {"folds": 4}, {"test": 0.2, "validation": 0.1}):
        with pytest.raises(PolicyRefusal, match="cuts the 5 folds"):
            open_job(tmp_path, declared=declared, split=split)


def test_subgroups_are_declared_groups_with_released_numbers(tmp_path: Path) -> None:
    write_table(tmp_path, 1000)
    site = open_job(tmp_path, declared={"columns": COLUMNS}, subgroups=["sex", "age:10", "dx"])
    assert site.release is not None
    groups = site.release.numbers.groups
    assert set(groups) == {"sex=F", "sex=M", "age=below 60", "age=from 60", "all=subjects"}
    assert groups["sex=F"] + groups["sex=M"] == groups["all=subjects"] == site.release.numbers.test
    assert set(site.trainer.examples.test_subgroups) == {"sex", "age"}
    sent = site.trainer.evaluate_subgroups(*site.trainer.complete(site.weights, {}))
    stated = site.release.state_counts(sent)
    assert {name: value for name, value in stated.items() if name.startswith("subjects in")} == {
        f"subjects in {name}": float(count) for name, count in groups.items()
    }


def test_a_person_is_one_value_of_the_site_s_column(tmp_path: Path) -> None:
    write_table(tmp_path)
    for id_ in (None, "lab"):
        with pytest.raises((PolicyRefusal, DataError), match="a person is one value of id here"):
            open_job(tmp_path, declared={"columns": COLUMNS}, id=id_)


def test_site_that_declares_nothing_keeps_its_number_and_has_no_subgroups(tmp_path: Path) -> None:
    write_table(tmp_path)
    site = open_job(tmp_path, declared=None, subgroups=["sex"])
    assert list_numbers(site) == (240, 48, 0)
    assert not site.trainer.examples.test_subgroups
    gone = frozenset(f"p{i}" for i in range(100))
    assert list_numbers(open_job(tmp_path, declared=None, withdrawn=gone)) == (240, 48, 0)
    # Its staff declares later: counted once.
    assert list_numbers(open_job(tmp_path, declared={"columns": COLUMNS}))[0] in range(175, 215)


def test_site_below_the_minimum_has_a_fixed_weight_and_folds_need_the_minimum(tmp_path: Path) -> None:
    write_table(tmp_path, 6)
    assert list_numbers(open_job(tmp_path, declared=None))[0] == 10
    with pytest.raises(PolicyRefusal, match="5 folds would have fewer than 10 people"):
        open_job(tmp_path, declared={"columns": COLUMNS})


def test_answer_that_left_is_given_again_whatever_was_asked_since(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    gate = ReleaseGate(tmp_path / "local", tmp_path / "release", Rule(10))
    assert [gate.keep_answer(name, lambda: "first") for name in "abc"] == ["first"] * 3
    assert [gate.keep_answer(name, lambda: "second") for name in "abcd"] == [*["first"] * 3, "second"]


def test_proposal_holds_what_can_be_declared_and_names_the_rest(tmp_path: Path) -> None:
    table = read_table(write_table(tmp_path, 1000))
    found, left = propose(table, "id", 5, Rule(10), 7)
    assert found.columns["age"] == (float(np.median(table.get_numbers("age"))),)
    assert found.columns["sex"] == (("F",), ("M",))
    assert {*found.columns, *left} == {"age", "sex", "dx", "lab", "y"}
    assert Declaration.model_validate(yaml.safe_load(yaml.safe_dump(found.model_dump(mode="json")))) == found
    assert propose(table, "id", 5, Rule(101), 7)[0].columns == {}
    fewer = propose(table, "id", 5, Rule(201), 7)[0]
    assert fewer.folds in (3, 4), "what the table suffices for"
    with pytest.raises(DataError, match=r"1000 people are too few for two folds of at least 600 each\. Declare"):
        propose(table, "id", 5, Rule(600), 7)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"id: &x id\ntable: *x", "not YAML: aliases such as *x are not allowed"),
        (b"\xff", "cannot be read: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_error_of_a_malformed_declaration_names_its_file_once(content: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / PEOPLE_FILE
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_declaration(tmp_path)
    assert str(caught.value) == f"{file}: cannot be read as a declaration of people: {problem}"
