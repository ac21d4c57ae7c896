"""Folders of sites that no example is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare_sparse.tasks.data.partition import list_folders_without_examples
from flare_sparse.tasks.task import Cohort


@pytest.mark.parametrize(
    ("ids", "folders"),
    [
        (("B/1", "B/2", "C/1"), ["A", "D"]),
        # One data set, whose folders are those of its subjects.
        (("sub-1", "sub-2"), []),
        # Identifiers with a slash that are not of these folders.
        (("B/1", "north/2"), []),
    ],
)
def test_folders_without_examples_are_those_beside_the_sites(
    tmp_path: Path, ids: tuple[str, ...], folders: list[str]
) -> None:
    for name in ("A", "B", "C", "D/anat", "derivatives", ".git", "__MACOSX"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "README.md").touch()
    assert list_folders_without_examples(tmp_path, Cohort(ids, {})) == folders
    assert list_folders_without_examples(tmp_path / "README.md", Cohort(ids, {})) == []
