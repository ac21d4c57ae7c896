"""Real FLARE jobs with sums in fixed point: in the simulator, and with the certificates of ``nvflare poc prepare``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import ENVIRONMENT
from egress import assert_logs_equal_ledger
from mortality_job import write_mortality_job
from safetensors.torch import load_file

from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.sim import run as run_in_simulator
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_mortality_job(tmp_path, "masked", 2, wire={"aggregation": "masked"})


def check_record(out: Path, summary: dict[str, Any], local: Path) -> None:
    """Check that a job ends with the bits of the local run, and that its ledger lists every message."""
    first, second = (load_file(folder / "model.safetensors") for folder in (out, local))
    assert all(bool((first[name] == second[name]).all()) for name in second)
    assert first.keys() == second.keys()
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    values = [line for line in lines if line["direction"] == "up" and line["scalars_sent"]]
    assert {line["values"] for line in values} == {"masked"}
    # Three sites: scores, then two rounds of weights.
    assert [line["content"] for line in values].count("scores") == 3
    assert [line["content"] for line in values].count("weights") == 6
    if (out / "workspace").exists():
        assert_logs_equal_ledger(out)


@pytest.mark.long
def test_simulator_run_ends_with_the_bits_of_the_local_one(config: Path, tmp_path: Path) -> None:
    settings = load_config(config)
    run_in_process(Study(settings, config), RunFolder(tmp_path / "local"))
    out = tmp_path / "sim"
    summary = run_in_simulator(Study(settings, config), RunFolder(out)).summary
    check_record(out, summary, tmp_path / "local")


@pytest.mark.long
@pytest.mark.usefixtures("poc_ports")
def test_masked_poc_run_signs_with_the_certificates_of_its_kits(config: Path, tmp_path: Path) -> None:
    run_in_process(Study.load(config), RunFolder(tmp_path / "local"))
    out = tmp_path / "poc"
    line = ["flare-sparse", "run", str(config), "--env", "poc", "--out", str(out)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check_record(out, json.loads((out / "summary.json").read_text()), tmp_path / "local")
    assert not (out / "kits").exists()
