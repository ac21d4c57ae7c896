"""A result folder: which one a run uses, the lock on it, and what it protects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flare_sparse.core.errors import ConfigError
from flare_sparse.results.runs.folder import RunFolder


def finish(folder: str) -> None:
    Path(folder).mkdir(parents=True)
    Path(folder, "summary.json").touch()


def test_default_folder_is_the_first_without_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = RunFolder(Path("runs/job"))
    assert job.choose().path == Path("runs/job")
    finish("runs/job")
    finish("runs/job-2")
    assert job.choose().path == Path("runs/job-3")
    resumed = replace(job, resume=True)
    assert resumed.choose() == RunFolder(Path("runs/job-2"), resume=True)
    assert replace(job, replaces=True).choose().path == Path("runs/job")
    Path("runs/job-3").mkdir()
    assert resumed.choose().path == Path("runs/job-3")


def test_claimed_folder_is_refused_to_others_until_the_block_ends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out")
    with (
        folder.claim(),
        pytest.raises(ConfigError, match="another flare-sparse command is writing to this folder"),
        folder.claim(),
    ):
        pass
    with folder.claim():
        assert folder.prepare().path == tmp_path / "out"


def test_run_in_the_folder_is_replaced_only_on_request(tmp_path: Path) -> None:
    finish(str(tmp_path / "out"))
    (tmp_path / "out" / "evaluations").mkdir()
    folder = RunFolder(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds a finished run, which would be lost(.|\n)*type this: new"):
        folder.prepare(advise=lambda flag: f"type this: {flag}")
    assert folder.is_finished
    folder = RunFolder(tmp_path / "out", replaces=True)
    folder.prepare()
    assert folder.is_finished, "a run may still be refused"
    folder.clear()
    assert not folder.is_finished
    assert not list((tmp_path / "out").iterdir())


def test_folder_with_checkpoints_is_interrupted_unless_the_server_keeps_the_state(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "job-1" / "server" / "00000001").mkdir(parents=True)
    folder = RunFolder(tmp_path)
    assert folder.has_checkpoint
    with pytest.raises(ConfigError, match=r"holds an interrupted run(.|\n)*last\n(.|\n)*new"):
        folder.prepare()
    assert folder.prepare(keeps_state=False).path == tmp_path
