"""Fixture of small finished runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

METHODS = {
    "neurosfl": "{name: neurosfl, sparsity: 0.9, rounds: 2}",
    "fedavg": "{name: fedavg, rounds: 2}",
    "local_only": "{name: local_only, rounds: 2}",
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of three runs on brain phantoms, by method."""
    folder = tmp_path_factory.mktemp("runs")
    file = folder / "brains.yaml"
    file.write_text(
        "name: brains\nseed: 1\nmethod: {name: fedavg}\n"
        "task: {name: brain_age, downsample: 4, split: {validation: 0.2}}\n"
        "simulator: {sites: 2, data: {phantom: {subjects: 10}}}\n"
    )
    for name, method in METHODS.items():
        run_in_process(Study.load(file, [f"method={method}"]), RunFolder(folder / name))
    return {name: folder / name for name in METHODS}
