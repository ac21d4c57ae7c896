"""``flare-sparse run --start``: a finished run goes on to a larger number of rounds."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flare_sparse.cli import app

STAYS = "stay,died,med_a,med_b\n" + "".join(f"{i},{i % 2},{i % 2},{i % 3 % 2}\n" for i in range(40))


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, and its finished run of two rounds in ``short``."""
    folder = tmp_path_factory.mktemp("continue")
    (folder / "stays.csv").write_text(STAYS)
    (folder / "job.yaml").write_text(
        "name: stays\nmethod: {name: topk_ef, fraction: 0.2, rounds: 2}\nwire: {values: bfloat16}\n"
        "task: {name: table, kind: binary, target: died, id: stay, "
        "features: [med_a, med_b], scaling: none, model: {name: mlp, hidden: [3]}}\n"
        "simulator: {sites: 2, data: {path: stays.csv, partition: {kind: iid}}}\n"
    )
    result = call("run", folder / "job.yaml", "--env", "local", "--out", folder / "short")
    assert result.exit_code == 0, result.output
    return folder


def read_record(out: Path) -> dict[str, Any]:
    """Return what a run's record says, without times."""
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    rounds = [{k: v for k, v in line.items() if k not in ("seconds", "committed_at")} for line in lines]
    summary = json.loads((out / "summary.json").read_text())
    # Messages of the finished run carry its run id, which is not that of the longer run.
    messages = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    ledger = [{k: v for k, v in line.items() if k != "run"} for line in messages]
    return {**summary, "seconds": 0, "lines": rounds, "ledger": ledger}


def compute_digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_continued_run_has_the_record_of_all_rounds_and_leaves_the_finished_one_unchanged(folder: Path) -> None:
    before = compute_digests(folder / "short")
    result = call(
        "run", folder / "job.yaml", "--env", "local", "--set", "method.rounds=4", "--start", folder / "short"
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert compute_digests(folder / "short") == before
    once = call("run", folder / "job.yaml", "--env", "local", "--set", "method.rounds=4", "--out", folder / "once")
    assert once.exit_code == 0, once.output
    continued = read_record(folder / "short-4")
    assert continued == read_record(folder / "once")
    assert [line["round"] for line in continued["lines"]] == [1, 2, 3, 4, 5]
    # A continued run can itself be continued.
    again = call(
        "run", folder / "short-4" / "config.yaml", "--env", "local", "--set", "method.rounds=5", "--start",
        folder / "short-4", "--out", folder / "five",
    )  # fmt: skip
    assert again.exit_code == 0, again.output


@pytest.mark.slow
def test_interrupted_continuation_resumes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "short", tmp_path / "short")
    arguments = ("run", folder / "job.yaml", "--env", "local", "--set", "method.rounds=4", "--out", tmp_path / "long")
    from flare_sparse.results.runs.record import RecordWriter

    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert call(*arguments, "--start", tmp_path / "short").exit_code != 0
    repeated = call(*arguments, "--start", tmp_path / "short")
    assert repeated.exit_code == 2, "the rounds since the interruption are not thrown away"
    assert f"go on with it: the same command with --out {tmp_path / 'long'} --start last" in repeated.output
    assert call(*arguments, "--start", "last").exit_code == 0
    again = call(*arguments, "--start", "last")
    assert again.exit_code == 1
    assert f"has finished. For more rounds: flare-sparse run {tmp_path / 'long' / 'config.yaml'}" in again.output
    once = call("run", folder / "job.yaml", "--env", "local", "--set", "method.rounds=4", "--out", tmp_path / "once")
    assert once.exit_code == 0, once.output
    assert read_record(tmp_path / "long") == read_record(tmp_path / "once")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--set", "method.rounds=2"),
            "method.rounds is 2, and the run has 2 already; set a larger total, such as method.rounds=4",
        ),
        (
            ("--set", "method.rounds=4", "--set", "seed=3"),
            "only method.rounds may differ from the finished run, but also do seed: 0",
        ),
        (("--set", "method.rounds=4", "--out", "SHORT"), "holds a finished run; choose another folder"),
        (("--set", "method.rounds=4", "--env", "prod", "--kit", "kit"), "does not apply to --env prod"),
    ],
)
def test_impossible_continuation_is_refused_with_the_reason(
    options: tuple[Any, ...], message: str, folder: Path
) -> None:
    options = tuple(folder / "short" if option == "SHORT" else option for option in options)
    result = call("run", folder / "job.yaml", "--env", "local", "--start", folder / "short", *options)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_continuation_without_record_or_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "short", tmp_path / "short")
    shutil.rmtree(tmp_path / "short" / "final_checkpoints")
    arguments = ("run", folder / "job.yaml", "--env", "local", "--set", "method.rounds=4", "--start")
    result = call(*arguments, tmp_path / "short")
    assert result.exit_code == 2
    assert "holds no checkpoint, so the run cannot be continued" in result.output
    result = call(*arguments, tmp_path)
    assert result.exit_code == 2
    assert "no record of a finished run" in result.output


def test_method_whose_schedule_has_ended_is_refused(folder: Path, tmp_path: Path) -> None:
    method = "method={name: fedsparsify, rounds: 2}"
    out = tmp_path / "short"
    assert call("run", folder / "job.yaml", "--env", "local", "--set", method, "--out", out).exit_code == 0
    result = call("run", out / "config.yaml", "--env", "local", "--set", "method.rounds=4", "--start", out)
    assert result.exit_code == 2
    assert "method fedsparsify: the sparsity of every round depends on method.rounds" in result.output
    assert not (tmp_path / "short-4").exists()
