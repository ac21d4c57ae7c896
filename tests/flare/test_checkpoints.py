"""A finished job keeps its checkpoints until FLARE has archived its result, and no longer."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from nvflare.apis.workspace import Workspace

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.flare.checkpoints import KEPT_DAYS, delete_archived, delete_old, mark_job_finished


@dataclass(frozen=True)
class Content:
    number: int


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for folder in ("startup", "local", "job-1", "job-2"):
        (tmp_path / folder).mkdir()
    return Workspace(str(tmp_path), "server")


def create_finished(root: Path, name: str, workspace: Workspace, job: str) -> Store:
    store = Store(root / name / "server", {})
    store.save(1, Content(1))
    mark_job_finished(store, workspace, job)
    return store


def test_checkpoints_are_deleted_only_after_the_result_is_archived(workspace: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    archived, unarchived = (
        create_finished(root, "a-1", workspace, "job-1"),
        create_finished(root, "b-2", workspace, "job-2"),
    )
    running = Store(root / "c-3" / "server", {})
    running.save(1, Content(1))
    delete_archived(root)
    assert [store.list_numbers() for store in (archived, unarchived, running)] == [[1], [1], [1]]
    shutil.rmtree(tmp_path / "job-1")  # as FLARE does after it has archived the job
    delete_archived(root)
    assert [store.list_numbers() for store in (archived, unarchived, running)] == [[], [1], [1]]
    assert archived.get_result_folder() is None
    assert unarchived.get_result_folder() == tmp_path / "job-2"


def test_checkpoints_of_a_job_that_runs_again_are_kept(workspace: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    rerun = create_finished(root, "a-1", workspace, "job-1")
    shutil.rmtree(tmp_path / "job-1")
    rerun.claim()
    delete_archived(root)
    assert rerun.list_numbers() == [1]
    rerun.release()
    delete_archived(root)
    assert rerun.list_numbers() == []


def test_checkpoints_of_a_resumed_run_are_kept(workspace: Workspace, tmp_path: Path) -> None:
    store = create_finished(tmp_path / "checkpoints", "a-1", workspace, "job-1")
    store.unmark_finished()
    shutil.rmtree(tmp_path / "job-1")
    delete_archived(tmp_path / "checkpoints")
    assert store.list_numbers() == [1]


DAY_S = 86_400


def build_site_store(root: Path, job: str) -> Store:
    store = Store(root / job / "site-1", {})
    store.claim()
    store.save(1, Content(1))
    return store


def test_site_deletes_checkpoints_of_ended_and_forgotten_jobs_only(tmp_path: Path) -> None:
    """Those of a running job, of an interrupted one and of another site stay."""
    for job in ("ended", "interrupted", "forgotten", "running"):
        store = build_site_store(tmp_path, job)
        if job != "running":
            store.release()
        if job == "ended":
            store.mark_finished(store.folder)
    other = Store(tmp_path / "ended" / "site-2", {})
    other.save(1, Content(1))
    now = time.time()
    long_ago = now - (KEPT_DAYS + 1) * DAY_S
    for job in ("forgotten", "running"):
        os.utime(tmp_path / job / "site-1", (long_ago, long_ago))
    delete_old(tmp_path, "site-1", now, days=KEPT_DAYS, and_finished=True)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")) == [
        "ended/site-2",
        "interrupted/site-1",
        "running/site-1",
    ]
    assert other.list_numbers() == [1]


def test_policy_term_decides_after_how_many_days_checkpoints_go(tmp_path: Path) -> None:
    """At the server, those of a finished job that FLARE may not have archived stay until the term is over, too."""
    now = time.time()
    for job, age in (("new", 1), ("old", 8)):
        store = build_site_store(tmp_path, job)
        store.release()
        store.mark_finished(store.folder)
        os.utime(store.folder, (now - age * DAY_S,) * 2)
    assert delete_old(tmp_path, "site-1", now, days=7) == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    delete_old(tmp_path, "site-1", now, days=30, and_finished=True)
    assert not list(tmp_path.iterdir())


def test_checkpoints_without_a_lock_file_are_as_old_as_they_were_before_they_were_looked_at(tmp_path: Path) -> None:
    for job, age_s in (("new", 0), ("old", 8 * 86_400)):
        folder = tmp_path / job / "site-1"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age_s,) * 2)
    assert delete_old(tmp_path, "site-1", days=7) == ["old"]
    # A clock that was set back: the folder is of the future.
    os.utime(tmp_path / "new" / "site-1", (time.time() + 3600,) * 2)
    assert delete_old(tmp_path, "site-1", days=0) == ["new"]
