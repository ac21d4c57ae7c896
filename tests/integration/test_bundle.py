"""A MONAI bundle in a real FLARE job in POC mode, at sites that were sent no code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import ENVIRONMENT

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

CONFIG = Path(__file__).parents[2] / "app_configs" / "neurosfl_bundle.yaml"
OVERRIDES = (
    "method.rounds=1",
    "method.training.epochs=1",
    "simulator.sites=2",
    "simulator.data.phantom.subjects=5",
)


@pytest.mark.long
@pytest.mark.usefixtures("poc_ports")
def test_bundle_in_poc_ends_with_the_bits_of_the_local_run(tmp_path: Path) -> None:
    config = load_config(CONFIG, OVERRIDES)
    local = run_in_process(Study(config, CONFIG), RunFolder(tmp_path / "local")).summary
    line = ["flare-sparse", "run", str(CONFIG), "--env", "poc", "--out", str(tmp_path / "poc")]
    line += [word for setting in OVERRIDES for word in ("--set", setting)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "poc" / "summary.json").read_text())
    assert {key: summary[key] for key in ("model_sha256", "final", "traffic")} == {
        key: local[key] for key in ("model_sha256", "final", "traffic")
    }
    exported = list((tmp_path / "poc" / "job").rglob("config_fed_client.json"))
    assert exported
    assert list(tmp_path.rglob("custom")) == []
