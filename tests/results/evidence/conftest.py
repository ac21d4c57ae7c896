"""A small finished run whose data comes from its configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder


@pytest.fixture(scope="session")
def phantom_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result folder of a run on brain phantoms."""
    folder = tmp_path_factory.mktemp("evidence")
    file = folder / "phantoms.yaml"
    file.write_text(
        "name: phantoms\nseed: 3\npermit: EA 12/2026\nmethod: {name: fedsparsify, sparsity: 0.5, rounds: 2}\n"
        "task: {name: brain_age, downsample: 4, split: {validation: 0.2}}\n"
        "simulator: {sites: 2, data: {phantom: {subjects: 10}}}\n"
    )
    run_in_process(Study.load(file), RunFolder(folder / "run"))
    return folder / "run"
