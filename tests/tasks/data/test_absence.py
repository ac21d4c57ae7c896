"""Withdrawn subjects are absent by the site's own identifiers, whatever a job names; what matches nobody is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from toy import Toy

from flare_sparse.config.withdrawals import Withdrawals
from flare_sparse.core.errors import DataError
from flare_sparse.tasks.columns import list_columns
from flare_sparse.tasks.data.source import LOCAL_FILE, WITHDRAWN_FILE, find_site_data
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Examples, SiteData, Task, build_examples, load_examples

ROWS = 30


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
def test_subject_is_absent_whatever_identifiers_the_job_names(task: dict[str, Any], tmp_path: Path) -> None:
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
def test_identifier_is_matched_as_text_and_one_that_matches_nothing_is_refused(
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
    # A file of arrays has no column: its examples are named by their numbers.
    np.savez(tmp_path / "images.npz", train_images=np.zeros((3, 2, 2), np.uint8))
    assert Withdrawals(frozenset({"1"})).open(SiteData("a", tmp_path / "images.npz")).withdrawn == {"1"}
