"""Subjects who withdraw at a deployed site: no later job reads their data, and no earlier checkpoint stays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.site.withdrawal import withdraw_at_site
from flare_sparse.tasks.data.source import find_site_data


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
    (tmp_path / "data").mkdir()
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 'data'}\nwithdrawn: [s0]\n")
    return kit


def write_list(folder: Path, *names: str) -> Path:
    (folder / "list.txt").write_text("\n".join(names))
    return folder / "list.txt"


def test_subjects_are_left_out_of_all_later_jobs_and_checkpoints_go(kit: Path, tmp_path: Path) -> None:
    store = Store(kit / "checkpoints" / "study-0123" / "site-1", {})
    store.save(1, Content(1))
    done = withdraw_at_site(kit, write_list(tmp_path, "s1", "s2"))
    assert (done.added, done.total, done.deleted) == (2, 2, ["study-0123"])
    assert not (kit / "checkpoints" / "study-0123").exists()
    again = withdraw_at_site(kit, write_list(tmp_path, "s2", "s3"))
    assert (again.added, again.total, again.deleted) == (1, 3, [])
    assert find_site_data("site-1", kit / "local", {}).withdrawn == {"s0", "s1", "s2", "s3"}


def test_running_job_must_end_first_but_the_subjects_are_on_the_list(kit: Path, tmp_path: Path) -> None:
    store = Store(kit / "checkpoints" / "study-0123" / "site-1", {})
    store.claim()
    store.save(1, Content(1))
    with pytest.raises(ConfigError, match="study-0123 is running with their data"):
        withdraw_at_site(kit, write_list(tmp_path, "s1"))
    assert find_site_data("site-1", kit / "local", {}).withdrawn == {"s0", "s1"}
    store.release()
    assert withdraw_at_site(kit, write_list(tmp_path, "s1")).deleted == ["study-0123"]
