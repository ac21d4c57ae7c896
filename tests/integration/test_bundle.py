"""A MONAI bundle in a real FLARE job, at sites that were sent no code."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare_sparse.api.local import run as run_in_process
from flare_sparse.api.start import launch
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
def test_bundle_in_a_job_ends_with_the_bits_of_the_local_run(tmp_path: Path) -> None:
    study = Study(load_config(CONFIG, OVERRIDES), CONFIG)
    local = run_in_process(study, RunFolder(tmp_path / "local")).summary
    summary = launch("sim", study, RunFolder(tmp_path / "sim")).summary
    assert {key: summary[key] for key in ("model_sha256", "final", "traffic")} == {
        key: local[key] for key in ("model_sha256", "final", "traffic")
    }
    assert list((tmp_path / "sim").rglob("config_fed_client.json"))
    assert [folder for folder in tmp_path.rglob("custom") if any(folder.iterdir())] == []
