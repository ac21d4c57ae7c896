"""Damaged checkpoints are set aside, and never again count as the newest ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from damage import DAMAGES

from flare_sparse.core.checkpoint.store import DAMAGED, Store

SEQUENCES = [damages for length in (1, 2, 3) for damages in product(DAMAGES, repeat=length)]


@dataclass(frozen=True)
class Content:
    number: int
    weights: torch.Tensor


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the flushes to disk, which take most of the time and which no test here needs."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    return None


def save(store: Store, number: int, also_keep: tuple[int, ...] = ()) -> None:
    store.save(number, Content(number, torch.full((64,), float(number))), also_keep)


@pytest.mark.slow
@pytest.mark.parametrize("damages", SEQUENCES, ids=" and ".join)
def test_run_saves_from_the_newest_intact_checkpoint_on(damages: tuple[str, ...], tmp_path: Path) -> None:
    """The newest checkpoints of four have one damage each; a run continues below their numbers and passes them."""
    store = Store(tmp_path, {})
    store.keep = 4
    for number in (1, 2, 3, 4):
        save(store, number)
    damaged = list(range(5 - len(damages), 5))
    for number, damage in zip(reversed(damaged), damages, strict=True):
        DAMAGES[damage](tmp_path / f"{number:08d}")
    store.keep = 2
    loaded = store.load(Content)
    assert loaded is not None
    assert loaded[0] == damaged[0] - 1
    assert store.list_numbers(DAMAGED) == damaged
    for number in range(damaged[0], 7):
        save(store, number)
        assert store.list_numbers() == [number - 1, number]
        assert store.load(Content)[0] == number  # type: ignore[index]
    assert store.list_numbers(DAMAGED) == damaged, "the evidence is kept"


@pytest.mark.parametrize("damages", list(product(DAMAGES, repeat=2)), ids=" and ".join)
def test_run_without_an_intact_checkpoint_saves_from_its_first_round_on(
    damages: tuple[str, str], tmp_path: Path
) -> None:
    store = Store(tmp_path, {})
    for number in (1, 2, 3):
        save(store, number)
    for number, damage in zip((2, 3), damages, strict=True):
        DAMAGES[damage](tmp_path / f"{number:08d}")
    assert store.load(Content) is None
    for number in range(1, 6):
        save(store, number)
        assert store.load(Content)[0] == number  # type: ignore[index]


def test_second_damage_of_one_number_replaces_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path, {})
    for damage in ("byte flipped", "manifest emptied"):
        save(store, 1)
        DAMAGES[damage](tmp_path / "00000001")
        assert store.load(Content) is None
    assert (tmp_path / "damaged-00000001" / "manifest.json").read_bytes() == b""


def test_damage_is_logged_without_a_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A site's log may be streamed to the server."""
    store = Store(tmp_path, {})
    save(store, 1)
    DAMAGES["byte flipped"](tmp_path / "00000001")
    store.load(Content)
    assert "checkpoint 00000001 is damaged" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_delete_removes_damaged_checkpoints_as_well(tmp_path: Path) -> None:
    """They hold a model and residuals: nothing of them may outlive the job's checkpoints."""
    store = Store(tmp_path, {})
    save(store, 1)
    DAMAGES["byte flipped"](tmp_path / "00000001")
    store.load(Content)
    store.delete()
    assert list(tmp_path.iterdir()) == []
