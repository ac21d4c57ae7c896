"""How far a site is within a training: the file has the last step, and is written at most once a second."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from flare_sparse.core.steps import StepFile, describe_step


def test_steps_are_counted_and_written_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    file = tmp_path / "steps.json"
    after_step = StepFile(file, "a").begin(3, 20, 2)
    assert describe_step(json.loads(file.read_text())) == "a: round 3, began"
    for moved, expected in ((0.5, 0), (0.6, 2), (0.1, 2), (1.0, 4)):
        clock[0] += moved
        after_step()
        assert json.loads(file.read_text())["step"] == expected
    clock[0] += 1
    for _ in range(16):
        after_step()
    assert describe_step(json.loads(file.read_text())) == "a: round 3, epoch 1 of 2, step 5 of 20"
    assert [path.name for path in tmp_path.iterdir()] == ["steps.json"]


def test_full_disk_ends_no_training(tmp_path: Path) -> None:
    StepFile(tmp_path / "gone" / "steps.json", "a").begin(1, 1, 1)()
