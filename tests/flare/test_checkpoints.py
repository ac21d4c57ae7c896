"""A job that ended keeps its checkpoints until FLARE has archived its result, and no longer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from nvflare.apis.workspace import Workspace

from flare_sparse.checkpoint.store import Store
from flare_sparse.flare.checkpoints import delete_archived, mark_job_finished


@dataclass(frozen=True)
class Content:
    number: int


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for folder in ("startup", "local", "job-1", "job-2"):
        (tmp_path / folder).mkdir()
    return Workspace(str(tmp_path), "server")


def ended(root: Path, name: str, workspace: Workspace, job: str) -> Store:
    store = Store(root / name / "server", {})
    store.save(1, Content(1))
    mark_job_finished(store, workspace, job)
    return store


def test_what_was_archived_is_forgotten_and_nothing_else(workspace: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    archived, not_yet = ended(root, "a-1", workspace, "job-1"), ended(root, "b-2", workspace, "job-2")
    running = Store(root / "c-3" / "server", {})
    running.save(1, Content(1))
    delete_archived(root)
    assert [store.list_numbers() for store in (archived, not_yet, running)] == [[1], [1], [1]]
    shutil.rmtree(tmp_path / "job-1")  # as FLARE does when the archive is written
    delete_archived(root)
    assert [store.list_numbers() for store in (archived, not_yet, running)] == [[], [1], [1]]
    assert archived.get_finished() is None
    assert not_yet.get_finished() == tmp_path / "job-2"


def test_a_job_that_runs_again_is_left_alone(workspace: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    again = ended(root, "a-1", workspace, "job-1")
    shutil.rmtree(tmp_path / "job-1")
    again.claim()
    delete_archived(root)
    assert again.list_numbers() == [1]
    again.release()
    delete_archived(root)
    assert again.list_numbers() == []


def test_a_run_that_goes_on_is_not_over(workspace: Workspace, tmp_path: Path) -> None:
    store = ended(tmp_path / "checkpoints", "a-1", workspace, "job-1")
    store.clear_finished()
    shutil.rmtree(tmp_path / "job-1")
    delete_archived(tmp_path / "checkpoints")
    assert store.list_numbers() == [1]
