"""A MONAI bundle in a real FLARE job in the simulator, at sites that were sent no code."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from flare_sparse.cli.environments import run_in_simulator
from flare_sparse.cli.local import run_config_locally
from flare_sparse.config import load_config

CONFIG = Path(__file__).parents[2] / "app_configs" / "neurosfl_bundle.yaml"
OVERRIDES = (
    "method.rounds=1",
    "method.training.epochs=1",
    "simulator.sites=2",
    "simulator.data.phantom.subjects=5",
)


@pytest.mark.long
def test_bundle_in_the_simulator_ends_with_the_bits_of_the_local_run(tmp_path: Path) -> None:
    config = load_config(CONFIG, OVERRIDES)
    simulated = run_in_simulator(config, CONFIG, tmp_path / "sim", Console(quiet=True))
    local = run_config_locally(config, CONFIG, tmp_path / "local", console=Console(quiet=True))
    assert simulated["model_sha256"] == local["model_sha256"]
    assert simulated["final"] == local["final"]
    assert list((tmp_path / "sim").rglob("custom")) == []
