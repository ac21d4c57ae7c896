"""The error of a simulated job that ended without a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.recipe import SimEnv

from flare_sparse.flare.launch import simulator
from flare_sparse.flare.launch.connection import JobFailed
from flare_sparse.flare.launch.simulator import (
    Workplace,
    _follow_lines,
    _read_lines,
    simulate,
    simulate_statistics,
    watch_site_processes,
)


@pytest.mark.parametrize(
    ("number", "logged", "expected"),
    [
        (-9, "INFO all is well", "FLARE's simulator was killed, most often because memory ran out"),
        (-9, "ERROR E_DATA: no file", "ERROR E_DATA: no file"),
        (1, "INFO all is well", "no error was logged"),
    ],
)
def test_simulator_without_a_result_names_the_cause(number: int, logged: str, expected: str, tmp_path: Path) -> None:
    def execute(_environment: Any) -> None:
        os.write(1, logged.encode())
        raise RuntimeError(f"Simulation failed with return code {number}. Logs are in per-site subdirectories")

    recipe: Any = SimpleNamespace(name="job", execute=execute)
    with pytest.raises(JobFailed) as caught:
        simulate(recipe, Workplace(["site-1"], str(tmp_path / "{site}.yaml")), tmp_path / "out")
    assert str(caught.value).splitlines()[1:] == [f"  {expected}", f"FLARE's log: {tmp_path / 'out' / 'flare.log'}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ERROR - Communication error with client site-1: ", "the process of site-1 died"),
        ("ERROR - Subprocess died for client h.org before send, exit code: -9", "the process of h.org died"),
        ("ERROR - run_client_thread error: Failed to create connection to the child process in X", "did not start"),
    ],
)
def test_simulation_ends_when_the_process_of_a_site_dies(line: str, expected: str, tmp_path: Path) -> None:
    """FLARE's simulator only logs it, and the round would wait for the site until its timeout."""
    log = tmp_path / "flare.log"
    command = [sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path / "site-2")]
    with watch_site_processes(log, tmp_path, grace_s=0) as dead, subprocess.Popen(command) as simulation:
        log.write_text(f"INFO - all is well\n{line}\n")
        simulation.wait(50)
    assert [expected in text for text in dead] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(("losses", "rounds"), [(1, 0), (simulator.STARTS, 0), (1, 1)])
def test_simulation_that_loses_a_site_before_the_first_round_starts_again(
    losses: int, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE resets the connection of about one of 400 processes that it starts."""
    monkeypatch.setattr(simulator, "watch_site_processes", partial(watch_site_processes, grace_s=0))
    record, starts = tmp_path / "workspace" / "job" / "server" / "simulate_job" / "statistics", []

    def execute(environment: SimEnv) -> None:
        starts.append(environment.clients)
        assert not record.exists()
        record.mkdir(parents=True)
        if len(starts) > losses:
            (record / "columns.json").write_text('{"age": 1}')
            return
        (record / "rounds.jsonl").write_text("{}\n" * rounds)
        os.write(1, b"ERROR - Communication error with client site-1: [Errno 104] Connection reset by peer\n")

    recipe: Any = SimpleNamespace(name="job", execute=execute)
    workplace = Workplace(["site-1"], str(tmp_path / "{site}.yaml"))
    arguments = (recipe, workplace, tmp_path, "statistics/columns.json")
    if rounds or losses == simulator.STARTS:
        with pytest.raises(JobFailed, match="the process of site-1 died"):
            simulate_statistics(*arguments)
    else:
        assert simulate_statistics(*arguments) == {"age": 1}
    assert starts == [["site-1"]] * (1 if rounds else min(losses + 1, simulator.STARTS))
    assert len(list(tmp_path.glob("flare.[0-9].log"))) == len(starts) - 1


def test_log_is_read_once_however_long_it_is(tmp_path: Path) -> None:
    log, has_ended = tmp_path / "flare.log", threading.Event()
    lines = _read_lines(log, has_ended, 0.01, once=True)
    assert next(lines) == b""
    log.write_text("one\ntw")
    assert next(lines) == b"one\n"
    log.write_text("one\ntwo\n")
    has_ended.set()
    assert list(lines) == [b"two\n"]


def test_lines_are_followed_across_a_step_back_that_shortens_the_file(tmp_path: Path) -> None:
    """A step back replaces the file by one without the discarded round, whose new line is longer than the old one."""
    file, followed = tmp_path / "rounds.jsonl", []
    texts = [json.dumps({"sequence": number}) + "\n" for number in (1, 2)]
    file.write_text("".join(texts))
    with _follow_lines(file, followed.append):
        deadline = time.monotonic() + 60
        while len(followed) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        part = tmp_path / "part"
        part.write_text(texts[0] + json.dumps({"sequence": 3, "events": ["stepped_back"]}) + "\n")
        part.replace(file)
    assert [line["sequence"] for line in followed] == [1, 2, 3]
