"""One of the 100 kills of benchmarks/faults/kill_matrix.py, on a provisioned federation of its own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from killable_federation import find_free_ports

ROOT = Path(__file__).parents[2]
CELL = "topk_ef:SP+SJ:saving"
"""Recovery from a dead job of the server or of a site: test_recovery.py."""


def test_hooks_of_the_kill_matrix_wrap_functions_that_exist() -> None:
    """The hooks name classes and methods as text, and a job whose hooks fail never starts."""
    file = ROOT / "benchmarks" / "faults" / "kills" / "hooks" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("kill_hooks", file)
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    wrapped = [(m, owner, name) for m, entries in hooks.WRAPPERS.items() for owner, name, _ in entries]
    assert [w for w in wrapped if not callable(getattr(getattr(importlib.import_module(w[0]), w[1]), w[2], None))] == []


@pytest.mark.long
def test_job_killed_while_it_saves_ends_with_the_model_of_an_undisturbed_run(tmp_path: Path) -> None:
    """FLARE reports what docs/provisioned.md gives under "When something dies"."""
    line = [sys.executable, str(ROOT / "benchmarks" / "faults" / "kill_matrix.py"), "--cells", CELL]
    line += ["--parts", "kills", "--lanes", "1", "--folder", str(tmp_path), "--first-port", str(find_free_ports(5))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False)
    (cell,) = [json.loads(file.read_text()) for file in (tmp_path / "cells").glob("*.json")]
    assert "error" not in cell, f"{cell}\n{done.stdout + done.stderr}"
    assert cell["committed"] == [1], "one round was committed before the kill"
    assert [check for check, holds in cell["checks"].items() if not holds] == []
    restarted, zombie = cell["steps"]
    assert restarted == "the supervisor restarted localhost"
    assert zombie.startswith("still RUNNING after 4 s; abort_job: InternalError")
    assert "delete_job: JobNotDone" in zombie
