"""Sites on a second device: the rows run in a process of their own, see :mod:`rows_other_device`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from other_device import require_compiler

ROWS = Path(__file__).with_name("rows_other_device.py")


@pytest.mark.long
def test_every_row_of_a_second_device_passes() -> None:
    require_compiler()
    # The engine of torch counts the devices at the first backward pass of a process: later ones have no queue.
    command = [sys.executable, "-m", "pytest", str(ROWS), "-n", "0", "-m", "", "-o", "addopts=--import-mode=importlib"]
    done = subprocess.run(command, cwd=ROWS.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
