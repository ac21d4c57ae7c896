"""Subjects who withdraw at a deployed site: no later job reads their data, and nothing of an earlier one stays."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.flare.running import RUNNING_FOLDER, list_uses
from flare_sparse.flare.site.people import withdraw_at_site
from flare_sparse.tasks.data.source import find_site_data

JOB = """
import sys, time
from types import SimpleNamespace
from nvflare.apis.workspace import Workspace
from flare_sparse.flare.running import hold_data
engine = SimpleNamespace(get_workspace=lambda: Workspace(sys.argv[1], "site-1"))
hold_data(SimpleNamespace(get_engine=lambda: engine, get_identity_name=lambda: "site-1", get_job_id=lambda: "job-1"))
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@dataclass(frozen=True)
class Content:
    number: int


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    kit = tmp_path / "site-1"
    for folder in ("startup", "local"):
        (kit / folder).mkdir(parents=True)
    server = {"service": {"target": "server:8002"}}
    (kit / "startup" / "fed_client.json").write_text(json.dumps({"client": {"fqsn": "site-1"}, "servers": [server]}))
    for name in ("s0", "s1", "s2", "s3"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 'data'}\nwithdrawn: [s0]\n")
    return kit


def write_list(folder: Path, *names: str) -> Path:
    (folder / "list.txt").write_text("\n".join(names))
    return folder / "list.txt"


@contextmanager
def run_job(kit: Path, seconds: float, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that uses the site's data as a job does, in a session of its own as FLARE starts it."""
    command = [sys.executable, "-c", JOB, str(kit), str(seconds)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment or None)
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == "held\n"
        yield job
    finally:
        job.kill()
        job.wait()
        job.stdout.close()


def test_subjects_are_left_out_of_all_later_jobs_and_what_jobs_hold_goes(kit: Path, tmp_path: Path) -> None:
    Store(kit / "checkpoints" / "study-0123" / "site-1", {}).save(1, Content(1))
    models = kit / "flare_sparse_models" / "0123"
    models.mkdir(parents=True)
    done = withdraw_at_site(kit, write_list(tmp_path, "s1", "s2"))
    assert done == ["2 subjects added, 2 on the list", "deleted: study-0123, flare_sparse_models"]
    assert not (kit / "checkpoints" / "study-0123").exists()
    assert not models.exists()
    assert (kit / "local" / "flare_sparse_withdrawn.txt").stat().st_mode & 0o777 == 0o600
    again = withdraw_at_site(kit, write_list(tmp_path, "s2", "s3"))
    assert again == ["1 subjects added, 3 on the list", "deleted: nothing"]
    assert find_site_data("site-1", kit / "local", {}).withdrawn == {"s0", "s1", "s2", "s3"}


def test_no_way_back_by_one_misspelt_identifier_of_several(kit: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 2 withdrawn identifiers match nothing \(first: 's02'"):
        withdraw_at_site(kit, write_list(tmp_path, "s1", "s02"))
    assert not (kit / "local" / "flare_sparse_withdrawn.txt").exists()


def test_no_way_back_by_a_job_that_runs_meanwhile(kit: Path, tmp_path: Path) -> None:
    """In another process, before its first checkpoint, with a folder of checkpoints that only this process knows."""
    leaving, scratch = write_list(tmp_path, "s1"), tmp_path / "scratch"
    Store(scratch / "study-0123" / "site-1", {}).save(1, Content(1))
    with run_job(kit, 60, FLARE_SPARSE_CHECKPOINTS=str(scratch)) as job:
        assert [(use.job, use.process) for use in list_uses(kit, "site-1", running=True)] == [("job-1", job.pid)]
        with pytest.raises(ConfigError, match=rf"job job-1 \(process {job.pid}\) is running with their data"):
            withdraw_at_site(kit, leaving)
        assert find_site_data("site-1", kit / "local", {}).withdrawn == {"s0", "s1"}
        (kit / "job-1" / "script").mkdir(parents=True)
        assert withdraw_at_site(kit, leaving, end_after_s=0)[1] == "deleted: study-0123, job-1"
        assert job.wait() < 0
    assert not (scratch / "study-0123").exists()
    with run_job(kit, 0.5):
        assert withdraw_at_site(kit, leaving, end_after_s=30)[1] == "deleted: nothing"
    assert list_uses(kit, "site-1", running=True) == []


def test_command_that_looks_at_the_same_time_is_no_running_job(kit: Path) -> None:
    with run_job(kit, 60):
        assert list_uses(kit, "site-1", running=False) == []
    with (kit / RUNNING_FOLDER / "site-1" / "job-1.json").open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        assert list_uses(kit, "site-1", running=True) == []
        assert [use.job for use in list_uses(kit, "site-1", running=False)] == ["job-1"]


def test_checkpoints_that_another_process_has_locked_are_not_passed_over(kit: Path, tmp_path: Path) -> None:
    store = Store(kit / "checkpoints" / "study-0123" / "site-1", {})
    store.claim()
    with pytest.raises(ConfigError, match="study-0123 is running with their data"):
        withdraw_at_site(kit, write_list(tmp_path, "s1"))
    store.release()
