"""A folder of checkpoints: each is whole or not there, the last ones are kept, and a stranger's is refused.

    <folder>/00000007/manifest.json    what it belongs to, the packed values, sha256 of everything
    <folder>/00000007/tensors.safetensors
    <folder>/finished                  of a run that ended: the folder of its result

A checkpoint is written under another name, flushed to the disk with its folder, and renamed: the rename is the commit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError
from .packing import pack, unpack
from .writing import replace_atomically, sync_to_disk, write_new_file

FORMAT = 2
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
FINISHED = "finished"


class Store:
    """Checkpoints of one end of one run.

    Args:
        folder: is made with the first checkpoint.
        belongs: what a checkpoint is of (run, model, settings); another's is refused.
        keep: how many of the last ones stay.
    """

    def __init__(self, folder: Path, belongs: Mapping[str, Any], keep: int = 2):
        self.folder, self.belongs, self.keep = folder, dict(belongs), keep

    def claim(self) -> None:
        """Hold the folder until this process ends, however it ends, or :meth:`release` is called.

        Raises:
            CheckpointError: another process holds it: the same job runs twice.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o600)
            self._hold()
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: held by another process, or not writable ({error.strerror}). The same job runs already: wait "
                "for it or abort it; or submit with another seed"
            ) from error

    def _hold(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise

    def release(self) -> None:
        """Give back what :meth:`claim` holds."""
        os.close(self._lock)

    def mark_finished(self, result: Path) -> None:
        """Say, on the disk, that the run is over and that its result lies in ``result``; the checkpoints stay.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            with replace_atomically(self.folder / FINISHED) as part:
                part.write_text(str(result), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{self.folder / FINISHED}: {error.strerror or error}") from error

    def get_finished(self) -> Path | None:
        """Where the result of the run lies, or lay, if it is over."""
        try:
            return Path((self.folder / FINISHED).read_text(encoding="utf-8"))
        except OSError:
            return None

    def clear_finished(self) -> None:
        """The run goes on, or starts anew."""
        (self.folder / FINISHED).unlink(missing_ok=True)

    def save(self, number: int, content: Any, spared: int | None = None) -> None:
        """Write a checkpoint; afterwards it is on the disk, whole, also if the power goes.

        Args:
            number: higher than those before.
            content: a dataclass of what a checkpoint may hold.
            spared: number of an earlier one that stays, too.

        Raises:
            CheckpointError: it could not be written; the ones before are as they were.
        """
        unfinished = self.folder / f".{number:08d}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            for name, data in self._files(content).items():
                write_new_file(unfinished / name, data)
            sync_to_disk(unfinished)
            unfinished.replace(self.folder / f"{number:08d}")
            sync_to_disk(self.folder)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"{self.folder}: the checkpoint could not be written: {error.strerror or error}. The ones before are intact"
            ) from error
        for old in [number for number in self.list_numbers()[: -self.keep] if number != spared]:
            shutil.rmtree(self.folder / f"{old:08d}", ignore_errors=True)

    def _files(self, content: Any) -> dict[str, bytes]:
        tensors: dict[str, Tensor] = {}
        packed = pack(content, tensors)
        data = safetensors.torch.save({name: part.detach().clone().contiguous() for name, part in tensors.items()})
        said = {
            "format": FORMAT,
            "belongs": self.belongs,
            "tensors": hashlib.sha256(data).hexdigest(),
            "content": packed,
        }
        return {TENSORS: data, MANIFEST: json.dumps({**said, "sha256": _digest(said)}).encode()}

    def load(self, kind: Any, below: int | None = None) -> tuple[int, Any] | None:
        """The newest whole checkpoint, with its number; None when there is none.

        Args:
            kind: declared type of what was saved.
            below: only those with a smaller number.

        Raises:
            CheckpointError: it is of another run, model or version; the text names what differs.
        """
        for number in reversed(self.list_numbers()):
            if below is not None and number >= below:
                continue
            said = self._whole(self.folder / f"{number:08d}")
            if said is not None:
                self._check(said)
                tensors = safetensors.torch.load((self.folder / f"{number:08d}" / TENSORS).read_bytes())
                return number, unpack(said["content"], kind, tensors)
        return None

    def check(self) -> None:
        """Raises:
        CheckpointError: the newest whole checkpoint is of another run, model or version.
        """
        for number in reversed(self.list_numbers()):
            if (said := self._whole(self.folder / f"{number:08d}")) is not None:
                return self._check(said)
        return None

    def delete(self, at_least: int = 0) -> None:
        """Forget the checkpoints with this number and above: of a run that is over, or was given up."""
        for number in self.list_numbers():
            if number >= at_least:
                shutil.rmtree(self.folder / f"{number:08d}", ignore_errors=True)

    def list_numbers(self) -> list[int]:
        """Of the checkpoints that are there, ascending, whole or not."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def _whole(self, folder: Path) -> dict[str, Any] | None:
        """The manifest, if every byte is what was written; None for a damaged checkpoint: the one before serves."""
        try:
            said = json.loads((folder / MANIFEST).read_bytes())
            claimed = said.pop("sha256")
            intact = claimed == _digest(said)
            return said if intact and said["tensors"] == _sha256(folder / TENSORS) else None
        except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError):
            return None

    def _check(self, said: Mapping[str, Any]) -> None:
        if said["format"] != FORMAT:
            raise CheckpointError(
                f"{self.folder}: written in format {said['format']}, this version reads {FORMAT}. Go on with the version "
                "that wrote it, or start afresh"
            )
        if differing := list(find_differences(said["belongs"], self.belongs)):
            raise CheckpointError(
                f"{self.folder}: of another job: {'; '.join(differing[:6])}. Go on with the settings that it was written "
                "with, or start afresh in another folder"
            )


def find_differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """``path: found -> wanted`` wherever two JSON values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() | wanted.keys()):
            yield from find_differences(found.get(name), wanted.get(name), f"{where}.{name}".strip("."))
    elif found != wanted:
        yield f"{where}: {found!r} in the checkpoint, {wanted!r} now"


def _digest(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
