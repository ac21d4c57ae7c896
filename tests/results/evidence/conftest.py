"""A small finished run whose data comes from its configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare_sparse.cli.local import run_config_locally
from flare_sparse.config.loading import load_config


@pytest.fixture(scope="session")
def phantom_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result folder of a run on brain phantoms."""
    folder = tmp_path_factory.mktemp("evidence")
    file = folder / "phantoms.yaml"
    file.write_text(
        "name: phantoms\nseed: 3\nmethod: {name: fedsparsify, sparsity: 0.5, rounds: 2}\n"
        "task: {name: brain_age, downsample: 4, split: {validation: 0.2}}\n"
        "simulator: {sites: 2, data: {phantom: {subjects: 10}}}\n"
    )
    run_config_locally(load_config(file), file, folder / "run")
    return folder / "run"
