"""A configuration that the tests of several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from line import LineTask

from flare_sparse.tasks.registry import TASKS


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of two sites with data."""
    monkeypatch.setitem(TASKS, "line", LineTask)
    for site in ("site-1", "site-2"):
        (tmp_path / site).mkdir()
        (tmp_path / site / "ok").touch()
    file = tmp_path / "line.yaml"
    file.write_text(
        "name: line\nmethod: {name: fedavg}\ntask: {name: line}\nsimulator: {sites: 2, data: {path: '{site}'}}\n"
    )
    return file
