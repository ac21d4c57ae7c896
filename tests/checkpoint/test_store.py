"""Checkpoints: whatever fails while one is written, the old or the new is there, whole; a stranger's is refused."""

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

from flare_sparse.checkpoint.store import MANIFEST, TENSORS, Store
from flare_sparse.errors import CheckpointError
from flare_sparse.mask import Mask

CALLS = ("open", "write", "fsync", "mkdir", "rename")


@dataclass(frozen=True)
class Content:
    number: int
    weights: torch.Tensor
    mask: Mask


def content(number: int) -> Content:
    return Content(number, torch.full((64,), float(number)), Mask(torch.arange(64) % 3 == number % 3))


def number_in(store: Store) -> int:
    """Of the checkpoint that a restart would find; its parts belong together."""
    found = store.load(Content)
    assert found is not None
    number, loaded = found
    assert loaded.number == number
    assert torch.equal(loaded.weights, content(number).weights)
    assert loaded.mask == content(number).mask
    return number


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run" / "server", {"run": "a" * 16, "job": {"method": {"sparsity": 0.9}}})


class Killed(BaseException):
    """The process is gone in the middle of a call."""


class Disk:
    """Counts the calls that reach the disk and fails the n-th."""

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
def test_whatever_call_fails_the_old_or_the_new_one_is_there_whole(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's way: fail the n-th call to the disk for n = 1, 2, ... until a save goes through."""
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
        assert number_in(store) == 2 if saved else number_in(store) in (1, 2)
        store.save(3, content(3))  # and the next save does not stumble over what was left
        assert number_in(store) == 3
        if disk.calls < n:
            break
    assert n > 8


def test_the_last_two_are_kept_and_a_damaged_one_is_passed_over(store: Store) -> None:
    for number in (1, 2, 3):
        store.save(number, content(number))
    assert store.list_numbers() == [2, 3]
    for name in (TENSORS, MANIFEST):
        path = store.folder / "00000003" / name
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 50)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            assert number_in(store) == 2
        path.write_bytes(whole[:-1])
        assert number_in(store) == 2
        path.write_bytes(whole)
    assert number_in(store) == 3
    assert store.load(Content, below=3)[0] == 2  # type: ignore[index]


def test_one_that_is_spared_stays_as_long_as_it_is(store: Store) -> None:
    for number in (1, 2, 3, 4):
        store.save(number, content(number), spared=1)
    assert store.list_numbers() == [1, 3, 4]
    store.save(5, content(5))
    assert store.list_numbers() == [4, 5]


def test_none_is_found_where_none_is(store: Store) -> None:
    assert store.load(Content) is None
    store.save(4, content(4))
    store.delete(4)
    assert store.load(Content) is None


def test_another_jobs_checkpoint_is_refused_and_the_difference_named(store: Store) -> None:
    store.save(1, content(1))
    other = Store(store.folder, {"run": "b" * 16, "job": {"method": {"sparsity": 0.95}}})
    with pytest.raises(CheckpointError, match=r"job\.method\.sparsity: 0\.9 in the checkpoint, 0\.95 now"):
        other.load(Content)
    with pytest.raises(CheckpointError, match="of another job"):
        other.check()


def test_another_format_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(1, content(1))
    monkeypatch.setattr("flare_sparse.checkpoint.store.FORMAT", 3)
    with pytest.raises(CheckpointError, match="written in format 2, this version reads 3"):
        store.load(Content)


def test_one_process_at_a_time(store: Store) -> None:
    """A job that is submitted while the same one runs does not write into its checkpoints."""
    store.claim()
    second = Store(store.folder, store.belongs)
    with pytest.raises(CheckpointError, match="The same job runs already"):
        second.claim()
    store.save(1, content(1))
    assert number_in(store) == 1
    os.close(store._lock)
    second.claim()
    os.close(second._lock)


@dataclass(frozen=True)
class Other:
    number: int
    weights: torch.Tensor


def test_what_is_not_what_was_declared_is_refused(store: Store) -> None:
    store.save(1, content(1))
    with pytest.raises(CheckpointError, match="Other has"):
        store.load(Other)
