"""The error of a simulated job that ended without a result."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flare_sparse.flare.launch.ending import JobFailed
from flare_sparse.flare.launch.simulator import simulate


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
        simulate(recipe, ["site-1"], str(tmp_path / "{site}.yaml"), tmp_path / "out")
    assert str(caught.value).splitlines()[1:] == [f"  {expected}", f"FLARE's log: {tmp_path / 'out' / 'flare.log'}"]
