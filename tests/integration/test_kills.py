"""The kill matrix (benchmarks/faults/kill_matrix.py) can begin; kills of jobs and servers: test_recovery.py."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
