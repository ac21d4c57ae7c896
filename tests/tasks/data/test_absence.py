"""Withdrawn subjects are absent by the site's own identifiers, whatever a job names; what matches nobody is refused."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from toy import Toy

import flare_sparse
from flare_sparse.config.withdrawals import Withdrawals
from flare_sparse.core.errors import DataError
from flare_sparse.tasks.columns import list_columns
from flare_sparse.tasks.data.absence import require_known_subjects
from flare_sparse.tasks.data.cases import find_images, select_cases
from flare_sparse.tasks.data.source import LOCAL_FILE, WITHDRAWN_FILE, find_site_data
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Examples, SiteData, Task, build_examples, load_examples

ROWS = 30
PACKAGE = Path(flare_sparse.__file__).parent
SELECTS = {"select", "_select", "select_cases", "load_cases", "find_absent_rows"}
READS = {
    *("cohort", "read_table", "read_rows", "read_subjects", "find_cases", "find_classes", "find_images"),
    *("find_raw_cases", "find_bids_cases", "compute_fingerprint", "write_predictions"),
}
OPENERS = {
    "api/estimate.py _count_subjects": "numbers of subjects for a forecast",
    "api/estimate.py build_dry_sites": "no data",
    "api/estimate.py name_sites": "names of sites",
    "cli/predict.py predict": "from open_data",
    "config/first_study.py _look_at_brains": "a folder that a person names, of no site and no run",
    "config/first_study.py _look_at_cases": "a folder that a person names, of no site and no run",
    "config/study.py _locate_data": "opened by prepare_site_data",
    "config/first_study.py _look_at_table": "a file that a person names, of no site and no run",
    "config/withdrawals.py open_data": "the run's list",
    "flare/session.py _open_site": "no data; the list of the kit, with which scripts are refused",
    "flare/site/people.py declare_people": "columns for a person; read_people leaves out who has withdrawn",
}
"""Functions outside tasks/ that make a location or read by one, and why nobody who has withdrawn comes back."""


def write_site(folder: Path, withdrawn: str, names: list[str] | None = None, column: str | None = "patient") -> Path:
    """Write a table whose third row is the withdrawn subject's, a site file and the list; return the local folder."""
    names = names or [f"p{i:03d}" for i in range(ROWS)]
    rows = [f"{names[i]},v{i},{100000 + i},{20 + i}.0,{i % 7}.5" for i in range(ROWS)]
    (folder / "t.csv").write_text("\n".join(["patient,visit,mrn,age,y", *rows]) + "\n")
    (folder / LOCAL_FILE).write_text(f"data: {folder / 't.csv'}\n" + (f"id: {column}\n" if column else ""))
    (folder / WITHDRAWN_FILE).write_text(withdrawn + "\n")
    return folder


def build_table(**task: Any) -> Task:
    settings = {"kind": "regression", "target": "y", "features": ["age"], "scaling": {"age": [0, 1]}}
    return TASKS["table"]({**settings, **task})


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"id": "patient"},
        {"id": "visit"},
        {"group": "mrn"},
        {"id": "visit", "group": "patient"},
    ],
)
def test_no_way_back_by_other_identifiers_of_a_job(task: dict[str, Any], tmp_path: Path) -> None:
    data, table = find_site_data("site", write_site(tmp_path, "p003"), {}), build_table(**task)
    examples = load_examples(table, data, 1)
    ages = {float(part[k][0].flatten()[0]) for part in (examples.train, examples.test) for k in range(len(part))}
    assert ages == {20.0 + i for i in range(ROWS) if i != 3}
    assert [column.rows for column in list_columns(table, data) if column.name == "age"] == [ROWS - 1]


@pytest.mark.parametrize(
    ("names", "withdrawn", "is_known"),
    [
        ([f"{i:03d}" for i in range(ROWS)], "003", True),
        ([f"{i:03d}" for i in range(ROWS)], "3", False),
        ([f"{i}.0" for i in range(1000, 1000 + ROWS)], "1003.0", True),
        ([f"{i}.0" for i in range(1000, 1000 + ROWS)], "1003", False),
        ([str(2**53 + i) for i in range(ROWS)], str(2**53 + 3), True),
        ([f"p{i}" for i in range(ROWS)], "p3\nP4", False),
    ],
)
def test_no_way_back_by_another_spelling_of_a_number(
    names: list[str], withdrawn: str, is_known: bool, tmp_path: Path
) -> None:
    local = write_site(tmp_path, withdrawn, names)
    if is_known:
        examples = load_examples(build_table(id="patient"), find_site_data("site", local, {}), 1)
        assert {*examples.train_ids, *examples.test_ids} == {*names} - {withdrawn}
    else:
        with pytest.raises(DataError, match="withdrawn identifiers match nothing"):
            find_site_data("site", local, {})


def test_table_without_the_sites_column_or_with_nameless_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected id: COLUMN"):
        find_site_data("site", write_site(tmp_path, "p003", column=None), {})
    with pytest.raises(DataError, match="row 1 has no patient"):
        find_site_data("site", write_site(tmp_path, "p003", ["", *(f"p{i:03d}" for i in range(1, ROWS))]), {})


def test_subject_of_two_data_sets_must_be_named_with_its_data_set(tmp_path: Path) -> None:
    for name in ("IXI/sub-07", "HCP/sub-07", "HCP/sub-08"):
        (tmp_path / "data" / name / "anat").mkdir(parents=True)
        (tmp_path / "data" / name.partition("/")[0] / "participants.tsv").write_text("participant_id\n")
    (tmp_path / LOCAL_FILE).write_text("data: data\n")
    for listed, message in (
        ("sub-08", ""),
        ("IXI/sub-07", ""),
        ("sub-07", "HCP and of IXI"),
        ("IXI/sub-08", "nothing"),
    ):
        (tmp_path / WITHDRAWN_FILE).write_text(listed)
        if message:
            with pytest.raises(DataError, match=message):
                find_site_data("site", tmp_path, {})
        else:
            assert find_site_data("site", tmp_path, {}).withdrawn == {listed}


class Own(Toy):
    """A task of the user; ``names`` are what it calls the rows of the table."""

    names: tuple[str, ...] = ()

    def load(self, data: SiteData, seed: int) -> Examples:
        split = self.config.split.assign(data.select(self.names), seed)
        return build_examples(split, lambda names: TensorDataset(torch.zeros(len(names), 1)))


def test_own_task_must_use_the_identifiers_of_the_sites_data(tmp_path: Path) -> None:
    data, task = find_site_data("site", write_site(tmp_path, "p003"), {}), Own({})
    task.names = tuple(f"p{i:03d}" for i in range(ROWS))
    examples = load_examples(task, data, 1)
    assert {*examples.train_ids, *examples.test_ids} == {*task.names} - {"p003"}
    task.names = tuple(map(str, range(ROWS)))
    with pytest.raises(DataError, match="otherwise than the site's data does"):
        load_examples(task, data, 1)


def test_list_of_a_run_is_narrowed_to_who_is_in_the_data(tmp_path: Path) -> None:
    write_site(tmp_path, "")
    gone = Withdrawals(frozenset({"p003", "q1"}), id="patient").open(SiteData("a", tmp_path / "t.csv"))
    assert gone.withdrawn == {"p003"}
    for one, other in ((None, "patient"), ("patient", None), ("patient", "visit")):
        assert Withdrawals(id=one).merge(Withdrawals(id=other)).id == "patient"
    Withdrawals(frozenset({"p003"}), id="patient").inherit(tmp_path / "later")
    assert Withdrawals.read(tmp_path / "later").subjects == {"p003"}
    # A file of arrays has no column: its examples are named by their numbers.
    np.savez(tmp_path / "images.npz", train_images=np.zeros((3, 2, 2), np.uint8))
    assert Withdrawals(frozenset({"1"})).open(SiteData("a", tmp_path / "images.npz")).withdrawn == {"1"}


def test_subject_is_known_by_a_name_at_most_four_folders_deep(tmp_path: Path) -> None:
    for name in ("a/b/c/case_07_0000.nii.gz", "a/b/c/d/case_08_0000.nii.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    require_known_subjects(SiteData("a", tmp_path, withdrawn=frozenset({"case_07"})))
    with pytest.raises(DataError, match="case_08"):
        require_known_subjects(SiteData("a", tmp_path, withdrawn=frozenset({"case_08"})))


def list_calls(function: ast.FunctionDef) -> set[str]:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}


def reads_path(function: ast.FunctionDef) -> bool:
    """Return whether a function uses the path of a site's data other than as the name of a source or in a text."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    sites = {arg.arg for arg in arguments if arg.annotation and "SiteData" in ast.unparse(arg.annotation)}
    named = {
        id(node)
        for outer in ast.walk(function)
        if isinstance(outer, ast.JoinedStr) or (isinstance(outer, ast.keyword) and outer.arg == "source")
        for node in ast.walk(outer)
    }
    paths = (node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr == "path")
    return any(getattr(node.value, "id", "") in sites and id(node) not in named for node in paths)


def test_every_opener_of_a_sites_data_leaves_out_who_has_withdrawn() -> None:
    """Outside tasks/ nothing reads but what is listed; in tasks/ whoever reads at the path of a site selects."""
    openers, careless = set(), set()
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef) or (calls := list_calls(node)) & SELECTS:
                continue
            if not name.startswith("tasks/") and calls & (READS | {"SiteData"}):
                openers.add(f"{name} {node.name}")
            elif name.startswith("tasks/") and reads_path(node):
                careless.add(f"{name} {node.name}")
    assert openers == {*OPENERS}
    # What finds out who is absent, and what reads the file of a site; labels are of examples that were selected.
    absence = ("require_known_subjects", "list_people", "narrow_absence")
    assert careless == {
        *(f"tasks/data/absence.py {name}" for name in absence),
        *(f"tasks/data/source.py {name}" for name in ("_require_path", "format_site_file")),
        "tasks/task.py _label_tests",
    }


@pytest.mark.parametrize(
    ("file", "withdrawn"),
    [
        ("sub-07_T1w.nii.gz", "sub-07"),
        ("case_07_0000.nii.gz", "case_07"),
        ("sub-07/anat/sub-07_ses-1_T1w.nii.gz", "sub-07"),
    ],
)
def test_files_of_a_subject_are_absent_in_every_layout(file: str, withdrawn: str, tmp_path: Path) -> None:
    """Also where the task takes each image for a subject of its own: the list is matched on names of files."""
    for name in (file, file.replace("07", "08"), file.replace("07", "070")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    gone = Withdrawals(frozenset({withdrawn, "of another site"}))
    data = gone.open(SiteData("a", tmp_path))
    cases = find_images(tmp_path, ["T1w"], "*", None)
    left = select_cases(data, cases)
    assert data.withdrawn == {withdrawn}
    assert len(cases) == 3
    assert {name for name in cases if "07" in name.replace("070", "")} == cases.keys() - left.keys()
    with pytest.raises(DataError, match="has withdrawn"):
        gone.open(SiteData("a", tmp_path / file))
    with pytest.raises(DataError, match="each of 3 cases is of a subject who has withdrawn"):
        select_cases(SiteData("a", tmp_path, withdrawn=frozenset(cases)), cases)
