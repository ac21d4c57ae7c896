"""A short form of benchmarks/faults/soak.py: every reply is accounted for in spite of faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_every_reply_of_eight_sites_is_accounted_for_with_a_fault_in_every_tenth(tmp_path: Path) -> None:
    line = [sys.executable, str(ROOT / "benchmarks" / "faults" / "soak.py"), "local", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*line, "--rounds", "60", "--share", "0.1"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak.json").read_text())["local"]
    assert found["rounds balanced"] == found["rounds recorded"] == 61
    assert found["asked"] == 61 * 8 == found["accepted"] + sum(found["rejected"].values()) + found["timed out"]
    assert {"E_SITE", "E_FINITE", "E_LEN"} == set(found["rejected"])
    assert found["timed out"] > 0
