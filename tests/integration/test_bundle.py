"""A MONAI bundle in real FLARE jobs in the simulator and in POC mode, at sites that were sent no code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import ENVIRONMENT
from rich.console import Console

from flare_sparse.cli.environments import run_in_simulator
from flare_sparse.cli.local import run_config_locally
from flare_sparse.config.loading import load_config

CONFIG = Path(__file__).parents[2] / "app_configs" / "neurosfl_bundle.yaml"
OVERRIDES = (
    "method.rounds=1",
    "method.training.epochs=1",
    "simulator.sites=2",
    "simulator.data.phantom.subjects=5",
)


@pytest.mark.long
@pytest.mark.usefixtures("poc_ports")
def test_bundle_in_the_simulator_and_in_poc_ends_with_the_bits_of_the_local_run(tmp_path: Path) -> None:
    config = load_config(CONFIG, OVERRIDES)
    local = run_config_locally(config, CONFIG, tmp_path / "local", console=Console(quiet=True))
    simulated = run_in_simulator(config, CONFIG, tmp_path / "sim", Console(quiet=True))
    line = ["flare-sparse", "run", str(CONFIG), "--env", "poc", "--out", str(tmp_path / "poc")]
    line += [word for setting in OVERRIDES for word in ("--set", setting)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for summary in (simulated, json.loads((tmp_path / "poc" / "summary.json").read_text())):
        assert summary["model_sha256"] == local["model_sha256"]
        assert summary["final"] == local["final"]
        assert summary["traffic"] == local["traffic"]
    exported = list((tmp_path / "poc" / "job").rglob("config_fed_client.json"))
    assert exported
    assert list(tmp_path.rglob("custom")) == []
