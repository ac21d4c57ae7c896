"""Three of the 25 kills of benchmarks/faults/kill_matrix.py, on a provisioned federation of its own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CELLS = ("SJ:aggregating", "SP+SJ:saving", "CJ:training")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


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
    line += ["--folder", str(folder), "--ports", *map(str, free_ports(2))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False)
    assert (folder / "kills.json").is_file(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "kills.json").read_text())["cells"]
    assert not [cell for cell in found.values() if "error" in cell], f"{found}\n{done.stderr}"
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", CELLS)
def test_killed_job_submitted_again_ends_with_the_model_of_an_undisturbed_run(name: str, cells: dict[str, Any]) -> None:
    cell = cells[name]
    assert cell["checks"]["hit"], "the kill came in another phase"
    assert cell["committed"] == [1], "one round was committed before the kill"
    assert cell["checks"]["committed rounds kept"], f"asked again: {cell['asked again']}"
    assert cell["checks"]["same model"]
    assert cell["checks"]["balanced"]


@pytest.mark.long
def test_flare_reports_and_restarts_what_the_docs_describe(cells: dict[str, Any]) -> None:
    """The facts that docs/provisioned.md gives under "When something dies"."""
    assert cells["SJ:aggregating"]["steps"] == ["FINISHED:EXECUTION_EXCEPTION"]
    assert cells["CJ:training"]["steps"] == ["FINISHED:EXECUTION_EXCEPTION"]
    restarted, zombie = cells["SP+SJ:saving"]["steps"]
    assert restarted == "the supervisor restarted localhost"
    assert zombie.startswith("still RUNNING after 20 s; abort_job: InternalError")
    assert "delete_job: JobNotDone" in zombie
