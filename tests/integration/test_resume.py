"""A job whose processes are all killed resumes from its last commit and ends with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

HERE = Path(__file__).parent
TOPK = {"name": "topk_ef", "fraction": 0.2}


def configuration(folder: Path, method: dict[str, Any], rounds: int = 8) -> Path:
    """Write a configuration of SumTask on three sites."""
    folder.mkdir()
    (folder / "own_task.py").write_text((HERE / "own_task.py").read_text())
    for site in ("site-1", "site-2", "site-3"):
        (folder / site).mkdir()
    content = {
        "name": "sum",
        "seed": 3,
        "method": {"rounds": rounds, "training": {"epochs": 1, "lr": 0.01}, **method},
        "task": {"class": "own_task.SumTask", "width": 32},
        "simulator": {"sites": 3, "data": {"path": str(folder / "{site}")}},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def command(*arguments: Any) -> list[str]:
    program = "from flare_sparse.cli import app; app()"
    return [sys.executable, "-c", program, *map(str, arguments)]


def last_commit(out: Path) -> int:
    """Return the number of the last commit on the disk."""
    return max((int(p.name) for p in out.glob("checkpoints/*/server/*") if p.name.isdigit()), default=0)


def kill_when(condition: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    """Kill every process of a run as soon as a condition holds."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and run.poll() is None:
        if condition():
            # FLARE's processes have process groups of their own, so killing the group of the run would miss them.
            processes = [*psutil.Process(run.pid).children(recursive=True), run]
            for process in processes:
                process.kill()
            run.wait()
            return
        time.sleep(0.02)
    pytest.fail("the run ended, or took too long, before it could be killed")


def read_summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def read_rounds(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "committed_at")} for line in lines]


@pytest.mark.long
def test_job_killed_in_a_round_and_after_its_last_one_ends_with_the_same_model_and_ledger(tmp_path: Path) -> None:
    """Residuals are kept at the sites. After the last round, models are written but not delivered."""
    file = configuration(tmp_path / "config", TOPK)
    run_in_process(Study.load(file), RunFolder(tmp_path / "whole"))
    out = tmp_path / "out"

    def start(*more: str) -> subprocess.Popen[bytes]:
        line = command("run", file, "--out", out, *more)
        return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    kill_when(lambda: last_commit(out) >= 3, start())
    assert not (out / "summary.json").exists()
    kill_when(lambda: any(out.glob("checkpoints/*/server/finished")), start("--start", "last"))
    undelivered = out / "workspace" / "sum" / "server" / "simulate_job" / "app_server" / "flare_sparse"
    before = {**read_summary(undelivered), "seconds": 0}
    assert not (out / "summary.json").exists()
    assert last_commit(out) == 8
    assert start("--start", "last").wait(120) == 0
    assert {**read_summary(out), "seconds": 0} == before
    assert "the same model is delivered now" in (out / "flare.log").read_text()
    assert not (out / "checkpoints").exists()
    assert read_summary(out)["model_sha256"] == read_summary(tmp_path / "whole")["model_sha256"]
    assert read_summary(out)["traffic"] == read_summary(tmp_path / "whole")["traffic"]
    assert read_rounds(out) == read_rounds(tmp_path / "whole")


@pytest.mark.long
def test_resume_with_other_settings_is_refused(tmp_path: Path) -> None:
    file = configuration(tmp_path / "config", TOPK, rounds=100)
    out = tmp_path / "out"
    run = subprocess.Popen(
        command("run", file, "--env", "local", "--out", out),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    kill_when(lambda: last_commit(out) >= 2, run)

    def resume(*more: str) -> Result:
        return CliRunner().invoke(
            app, ["run", str(file), "--env", "local", "--out", str(out), "--start", "last", *more]
        )

    refused = resume("--set", "method.fraction=0.3")
    assert refused.exit_code != 0
    message = " ".join(refused.output.split())
    assert "E_CHECKPOINT" in message
    assert "job.method.fraction: 0.2 in the checkpoint, 0.3 now" in message
    assert resume().exit_code == 0
    assert "holds no checkpoint" in " ".join(resume().output.split())


@pytest.mark.long
def test_simulator_continues_a_finished_run_of_any_environment(tmp_path: Path) -> None:
    """Four rounds in this process and four more in the simulator are eight at once; residuals lie at the sites."""
    file = configuration(tmp_path / "config", TOPK)
    short, long, whole = tmp_path / "short", tmp_path / "long", tmp_path / "whole"
    for arguments in (
        ("--env", "local", "--set", "method.rounds=4", "--out", short),
        ("--env", "sim", "--start", short, "--out", long),
        ("--env", "local", "--out", whole),
    ):
        subprocess.run(command("run", file, *arguments), check=True, capture_output=True)
    assert read_summary(long)["model_sha256"] == read_summary(whole)["model_sha256"]
    assert read_rounds(long) == read_rounds(whole)
    # Messages of the finished run carry its run id.
    ids = [read_summary(out)["run"] for out in (short, long, whole)]
    ledger = (long / "ledger.jsonl").read_text().replace(ids[0], ids[2]).replace(ids[1], ids[2])
    # In the simulator the updates of a round arrive in any order.
    assert sorted(ledger.splitlines()) == sorted((whole / "ledger.jsonl").read_text().splitlines())
    # The simulator's run can itself be continued.
    more = command("run", file, "--env", "local", "--set", "method.rounds=9", "--start", long)
    subprocess.run(more, check=True, capture_output=True)
    assert read_summary(tmp_path / "long-9")["rounds"] == 9
