"""A run in the simulator that is killed: its output has grown meanwhile, no process stays, and it can be resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

HERE = Path(__file__).parent
COMMAND = "from flare_sparse.cli import app; app()"


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def count_rounds(out: Path) -> list[int]:
    file = out / "rounds.jsonl"
    return [json.loads(line)["round"] for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.long
def test_killed_command_leaves_growing_files_and_no_process(tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text((HERE / "own_task.py").read_text())
    for site in ("site-1", "site-2"):
        (tmp_path / site).mkdir()
    content = {
        "name": "sum",
        "seed": 3,
        "method": {"name": "fedavg", "rounds": 100000, "training": {"epochs": 1, "lr": 0.01}},
        "task": {"class": "own_task.SumTask", "width": 32},
        "simulator": {"sites": 2, "data": {"path": str(tmp_path / "{site}")}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    out = tmp_path / "out"
    line = [sys.executable, "-c", COMMAND, "run", str(tmp_path / "config.yaml"), "--out", str(out)]
    command = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    try:
        wait_for(lambda: len(count_rounds(out)) >= 3, 240)
        processes = psutil.Process(command.pid).children(recursive=True)
        # The simulator and one process for each site.
        assert len(processes) >= 3
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    rounds = count_rounds(out)
    assert rounds == list(range(1, len(rounds) + 1))
