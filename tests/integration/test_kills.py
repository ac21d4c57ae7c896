"""Two of the 100 kills of benchmarks/faults/kill_matrix.py, on a provisioned federation of its own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killable_federation import find_free_ports

ROOT = Path(__file__).parents[2]
CELLS = ("topk_ef:SP+SJ:saving", "topk_ef:CJ:training")
"""Recovery from a dead job of the server: test_recovery.py."""


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


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of each kill, by name."""
    folder = tmp_path_factory.mktemp("kills")
    line = [sys.executable, str(ROOT / "benchmarks" / "faults" / "kill_matrix.py"), "--cells", ",".join(CELLS)]
    line += ["--parts", "kills", "--lanes", "1", "--folder", str(folder), "--first-port", str(find_free_ports(5))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False)
    outcomes = [json.loads(file.read_text()) for file in (folder / "cells").glob("*.json")]
    found = {":".join(outcome[key] for key in ("method", "target", "phase")): outcome for outcome in outcomes}
    assert sorted(found) == sorted(CELLS), done.stdout + done.stderr
    assert not [cell for cell in outcomes if "error" in cell], f"{found}\n{done.stdout}"
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", CELLS)
def test_killed_job_submitted_again_ends_with_the_model_of_an_undisturbed_run(name: str, cells: dict[str, Any]) -> None:
    cell = cells[name]
    assert cell["committed"] == [1], "one round was committed before the kill"
    assert [check for check, holds in cell["checks"].items() if not holds] == []


@pytest.mark.long
def test_flare_reports_and_restarts_what_the_docs_describe(cells: dict[str, Any]) -> None:
    """The facts that docs/provisioned.md gives under "When something dies"."""
    assert cells["topk_ef:CJ:training"]["steps"] == ["FINISHED:EXECUTION_EXCEPTION"]
    restarted, zombie = cells["topk_ef:SP+SJ:saving"]["steps"]
    assert restarted == "the supervisor restarted localhost"
    assert zombie.startswith("still RUNNING after 4 s; abort_job: InternalError")
    assert "delete_job: JobNotDone" in zombie
