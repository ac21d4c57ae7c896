"""The script of all checks that need a GPU, on a CPU: its steps, and that it goes on where it ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu" / "run.py"
STEPS = ["agreement", "same_bits", "removal"]


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(SCRIPT), "--data", str(folder), "--out", str(folder / "out"), *options]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.long
def test_steps_run_once_and_a_failed_one_again(tmp_path: Path) -> None:
    small = ("--device", "cpu", "--small", "--steps")
    first = run(tmp_path, *small, *STEPS)
    assert first.returncode == 0, first.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == STEPS
    # On a CPU, both sides of each comparison are the same computation.
    assert set(lines[0].values()) >= {0.0}
    assert lines[1]["default"] is lines[1]["deterministic"] is True
    # Finished steps are skipped. There is no cohort in this folder: each step of a table says so, and the others go on.
    for _ in range(2):
        failed = run(tmp_path, *small, *STEPS, "hippocampus", "--seeds", "1", "--folds", "2")
        assert failed.returncode == 1
        assert [json.loads(line)["error"][:9] for line in failed.stdout.splitlines()] == 3 * ["DataError"], (
            "small runs have one fold"
        )


@pytest.mark.slow
def test_machine_without_a_gpu_is_told_so_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(tmp_path)
    assert (done.returncode, "finds no GPU on this machine; nothing was run" in done.stdout) == (1, True)
    assert not (tmp_path / "out").exists()
