"""Which checkpoints a finished run keeps, and which another run that continues it receives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.results.runs.continuation import FINAL, copy_checkpoints, keep_final_checkpoints
from flare_sparse.rounds.endpoints.events import SERVER


@dataclass(frozen=True)
class Content:
    number: int


def list_numbers(folder: Path) -> dict[str, list[int]]:
    return {end: Store(folder / end, {}).list_numbers() for end in (SERVER, "site-1", "site-2")}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Commits 1 to 3 of a server; site-2 has missed round 3; both sites have answered the final evaluation."""
    for end, numbers in ((SERVER, [1, 2, 3]), ("site-1", [1, 2, 3, 4]), ("site-2", [1, 2, 4])):
        for number in numbers:
            Store(tmp_path / "checkpoints" / "job" / end, {}, keep=9).save(number, Content(number))
    return tmp_path / "checkpoints"


def test_site_keeps_the_memory_before_its_last_update_which_may_not_have_counted(run: Path) -> None:
    keep_final_checkpoints(run)
    assert list_numbers(run.with_name(FINAL) / "job") == {SERVER: [3], "site-1": [2, 3], "site-2": [1, 2]}


def test_another_run_receives_what_each_end_continues_from(run: Path, tmp_path: Path) -> None:
    for below, numbers in (
        (None, {SERVER: [3], "site-1": [3, 4], "site-2": [2, 4]}),
        (3, {SERVER: [2], "site-1": [1, 2], "site-2": [1, 2]}),
    ):
        target = tmp_path / str(below)
        copy_checkpoints(run / "job", lambda end, target=target: Store(target / end, {"run": "new"}), below)
        assert list_numbers(target) == numbers
