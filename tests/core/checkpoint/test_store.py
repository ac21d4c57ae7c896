"""Checkpoints: a failed write leaves the old or the new one intact, and those of another run are refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from flare_sparse.core.checkpoint.store import DAMAGED, MANIFEST, TENSORS, Store
from flare_sparse.core.errors import CheckpointError
from flare_sparse.core.mask import Mask

CALLS = ("open", "write", "fsync", "mkdir", "rename")


@dataclass(frozen=True)
class Content:
    number: int
    weights: torch.Tensor
    mask: Mask


def content(number: int) -> Content:
    return Content(number, torch.full((64,), float(number)), Mask(torch.arange(64) % 3 == number % 3))


def find_newest_number(store: Store) -> int:
    """Return the number of the checkpoint that a restart finds, after a check that its parts belong together."""
    newest = store.load(Content)
    assert newest is not None
    number, loaded = newest
    assert loaded.number == number
    assert torch.equal(loaded.weights, content(number).weights)
    assert loaded.mask == content(number).mask
    return number


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run" / "server", {"run": "a" * 16, "job": {"method": {"sparsity": 0.9}}})


class Killed(BaseException):
    """Stands for a kill of the process in the middle of a call."""


class Disk:
    """Counts calls to the disk and lets the n-th one fail."""

    def __init__(self, nth: int, fault: str):
        self.nth, self.fault, self.calls = nth, fault, 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls != self.nth:
                return call(*args, **kwargs)
            if self.fault == "short" and call.__name__ == "write":
                return call(args[0], bytes(args[1])[: max(1, len(args[1]) // 2)])
            if self.fault == "short":
                return call(*args, **kwargs)
            if self.fault == "kill half written" and call.__name__ == "write":
                call(args[0], bytes(args[1])[: len(args[1]) // 2])
            if self.fault.startswith("kill"):
                raise Killed
            raise OSError(getattr(errno, self.fault), os.strerror(getattr(errno, self.fault)))

        return wrapped


@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "short", "kill", "kill half written"])
def test_failure_of_any_disk_call_leaves_the_old_or_the_new_checkpoint_intact(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SQLite does: the n-th call to the disk fails, for n = 1, 2, ... until a save succeeds."""
    for n in count(1):
        store, disk, saved = Store(tmp_path / str(n), {}), Disk(n, fault), True
        store.save(1, content(1))
        with monkeypatch.context() as patched:
            for name in CALLS:
                patched.setattr(os, name, disk.around(getattr(os, name)))
            try:
                store.save(2, content(2))
            except (CheckpointError, Killed):
                saved = False
        assert find_newest_number(store) == 2 if saved else find_newest_number(store) in (1, 2)
        # Remains of the failed save do not disturb the next one.
        store.save(3, content(3))
        assert find_newest_number(store) == 3
        if disk.calls < n:
            break
    assert n > 8


def put_back(store: Store, number: int) -> None:
    """Undo that a damaged checkpoint was set aside."""
    (store.folder / f"damaged-{number:08d}").rename(store.folder / f"{number:08d}")


def test_two_newest_are_kept_and_damaged_ones_are_skipped(store: Store) -> None:
    for number in (1, 2, 3):
        store.save(number, content(number))
    assert store.list_numbers() == [2, 3]
    for name in (TENSORS, MANIFEST):
        path = store.folder / "00000003" / name
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 50)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            assert find_newest_number(store) == 2
            put_back(store, 3)
        path.write_bytes(whole[:-1])
        assert find_newest_number(store) == 2
        put_back(store, 3)
        path.write_bytes(whole)
    assert find_newest_number(store) == 3
    assert store.load(Content, below=3)[0] == 2  # type: ignore[index]


def test_manifest_of_deeply_nested_json_counts_as_damaged(store: Store) -> None:
    """Python's reader gives up with a RecursionError, which must not end every resume."""
    for number in (1, 2):
        store.save(number, content(number))
    (store.folder / "00000002" / MANIFEST).write_text("[" * 100_000)
    assert find_newest_number(store) == 1
    assert store.list_numbers(DAMAGED) == [2]


def test_also_kept_checkpoint_stays_until_it_is_no_longer_named(store: Store) -> None:
    for number in (1, 2, 3, 4):
        store.save(number, content(number), also_keep=(1, None))
    assert store.list_numbers() == [1, 3, 4]
    store.save(5, content(5))
    assert store.list_numbers() == [4, 5]


def test_load_returns_none_without_a_checkpoint(store: Store) -> None:
    assert store.load(Content) is None
    store.save(4, content(4))
    store.delete(4)
    assert store.load(Content) is None


def test_checkpoint_of_another_job_is_refused_with_the_difference(store: Store) -> None:
    store.save(1, content(1))
    other = Store(store.folder, {"run": "b" * 16, "job": {"method": {"sparsity": 0.95}}})
    with pytest.raises(CheckpointError, match=r"job\.method\.sparsity: 0\.9 in the checkpoint, 0\.95 now"):
        other.load(Content)
    with pytest.raises(CheckpointError, match="of another job"):
        other.check()


def test_checkpoint_of_another_format_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(1, content(1))
    monkeypatch.setattr("flare_sparse.core.checkpoint.store.FORMAT", 5)
    with pytest.raises(CheckpointError, match="written in format 4, this version reads 5"):
        store.load(Content)


def test_second_process_cannot_claim_the_folder(store: Store) -> None:
    """A job submitted while the same one runs does not write into its checkpoints."""
    store.claim()
    second = Store(store.folder, store.identity)
    with pytest.raises(CheckpointError, match="If the same job is running already"):
        second.claim()
    store.save(1, content(1))
    assert find_newest_number(store) == 1
    os.close(store._lock)
    second.claim()
    os.close(second._lock)


@dataclass(frozen=True)
class Other:
    number: int
    weights: torch.Tensor


def test_checkpoint_with_other_fields_is_refused(store: Store) -> None:
    store.save(1, content(1))
    with pytest.raises(CheckpointError, match="Other has"):
        store.load(Other)
