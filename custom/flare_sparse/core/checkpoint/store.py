"""A folder of checkpoints: each is complete or absent; the newest are kept; those of another run are refused.

    <folder>/00000007/manifest.json        identity of the run, packed values, sha256 of everything
    <folder>/00000007/tensors.safetensors
    <folder>/damaged-00000006              evidence: a checkpoint that failed its checksums
    <folder>/stepped-back-00000005         an intact checkpoint that the run does not continue from
    <folder>/finished                      exists after the end of the run: path of its result folder

A checkpoint is written under a temporary name, flushed to disk with its folder, and renamed: the rename is the commit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError
from ..params import separate_tensors
from .packing import pack, unpack
from .writing import lock_folder, replace_atomically, sync_to_disk, write_new_file

FORMAT = 4
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
FINISHED = "finished"
DAMAGED = "damaged-"
STEPPED_BACK = "stepped-back-"

_LOG = logging.getLogger(__name__)


class Store:
    """Checkpoints of one end of one run.

    Args:
        folder: folder of the checkpoints, created with the first one.
        identity: run, model and settings; a checkpoint with another identity is refused.
        keep: number of checkpoints to keep, newest first.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], keep: int = 2):
        self.folder, self.identity, self.keep = folder, dict(identity), keep

    def claim(self) -> None:
        """Lock the folder until :meth:`release` is called or this process ends, even by a crash.

        Raises:
            CheckpointError: another process holds the lock (the same job runs twice), or the folder is not writable.
        """
        try:
            self._lock = lock_folder(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: locked by another process, or not writable ({error.strerror}). If the same job is "
                "running already, wait for it, abort it, or submit with another seed"
            ) from error

    def release(self) -> None:
        """Release the lock of :meth:`claim`."""
        os.close(self._lock)

    def mark_finished(self, result: Path) -> None:
        """Record on disk that the run has ended and that its result is in ``result``; the checkpoints stay.

        Raises:
            CheckpointError: the file could not be written.
        """
        try:
            with replace_atomically(self.folder / FINISHED) as part:
                part.write_text(str(result), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{self.folder / FINISHED}: {error.strerror or error}") from error

    def get_result_folder(self) -> Path | None:
        """Return the result folder of a finished run, which may be removed by now; None if the run is not finished."""
        try:
            return Path((self.folder / FINISHED).read_text(encoding="utf-8"))
        except OSError:
            return None

    def unmark_finished(self) -> None:
        """Record that the run continues or starts again."""
        (self.folder / FINISHED).unlink(missing_ok=True)

    def save(self, number: int, content: Any, also_keep: Collection[int | None] = ()) -> None:
        """Write a checkpoint, completely and to disk, and delete older ones.

        Args:
            number: number of the checkpoint, higher than all earlier ones.
            content: a dataclass that :func:`~flare_sparse.core.checkpoint.packing.pack` accepts.
            also_keep: numbers of older checkpoints that are not deleted; None stands for none.

        Raises:
            CheckpointError: the checkpoint could not be written; earlier ones are unchanged.
        """
        self._write(number, self._build_files(content))
        for outdated in self.list_numbers()[: -self.keep]:
            if outdated not in also_keep:
                shutil.rmtree(self.folder / f"{outdated:08d}", ignore_errors=True)

    def _write(self, number: int, files: Mapping[str, bytes]) -> None:
        unfinished = self.folder / f".{number:08d}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            for name, data in files.items():
                write_new_file(unfinished / name, data)
            # The names of the files must be on disk before the rename makes the checkpoint visible.
            sync_to_disk(unfinished)
            unfinished.replace(self.folder / f"{number:08d}")
            sync_to_disk(self.folder)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"{self.folder}: the checkpoint could not be written: {error.strerror or error}. Earlier "
                "checkpoints are intact"
            ) from error

    def _build_files(self, content: Any) -> dict[str, bytes]:
        tensors: dict[str, Tensor] = {}
        packed = pack(content, tensors)
        data = safetensors.torch.save(separate_tensors(tensors))
        manifest = {
            "format": FORMAT,
            "belongs": self.identity,
            "tensors": hashlib.sha256(data).hexdigest(),
            "content": packed,
        }
        return {TENSORS: data, MANIFEST: _dump_manifest(manifest)}

    def load(self, kind: Any, below: int | None = None) -> tuple[int, Any] | None:
        """Return number and content of the newest undamaged checkpoint; None if there is none.

        Newer checkpoints that are damaged are set aside under another name, ``damaged-NUMBER``.

        Args:
            kind: declared type of the content.
            below: consider only checkpoints with a smaller number.

        Raises:
            CheckpointError: the checkpoint belongs to another run, model or version, and the text names the
                differences; or a damaged one cannot be renamed.
        """
        for number in reversed(self.list_numbers()):
            if below is not None and number >= below:
                continue
            manifest = self._read_manifest(number)
            if manifest is None:
                self._set_aside(number, DAMAGED)
                # FLARE may stream a site's log to the server: the text names no path.
                _LOG.warning("checkpoint %08d is damaged and not used; it is kept as %s%08d", number, DAMAGED, number)
                continue
            self._check_identity(manifest)
            tensors = safetensors.torch.load((self.folder / f"{number:08d}" / TENSORS).read_bytes())
            return number, unpack(manifest["content"], kind, tensors)
        return None

    def find_newest(self, below: int | None = None) -> int | None:
        """Return the number of the newest undamaged checkpoint, which may belong to another run; None without one."""
        return max((number for number in self.list_intact() if below is None or number < below), default=None)

    def copy_newest(self, target: Store, below: int | None = None) -> int | None:
        """Copy the newest undamaged checkpoint to the store of another run, which owns the copy.

        Args:
            target: receives the copy.
            below: consider only checkpoints with a smaller number.

        Returns:
            Number of the checkpoint; None if there is none.

        Raises:
            CheckpointError: the copy could not be written.
        """
        number = self.find_newest(below)
        if number is not None:
            data = (self.folder / f"{number:08d}" / TENSORS).read_bytes()
            manifest = {**(self._read_manifest(number) or {}), "belongs": target.identity}
            target._write(number, {TENSORS: data, MANIFEST: _dump_manifest(manifest)})
        return number

    def check(self) -> None:
        """Raise unless the newest undamaged checkpoint belongs to this run.

        Raises:
            CheckpointError: it belongs to another run, model or version; the text names the differences.
        """
        if manifest := next(filter(None, map(self._read_manifest, reversed(self.list_numbers()))), None):
            self._check_identity(manifest)

    def delete(self, at_least: int = 0) -> None:
        """Delete the checkpoints with this number and above, also those that were set aside."""
        for prefix in ("", DAMAGED, STEPPED_BACK):
            for number in self.list_numbers(prefix):
                if number >= at_least:
                    shutil.rmtree(self.folder / f"{prefix}{number:08d}", ignore_errors=True)

    def list_numbers(self, prefix: str = "") -> list[int]:
        """Return the numbers of all checkpoints, ascending; damaged ones count until :meth:`load` sets them aside.

        Args:
            prefix: beginning of the names of those that were set aside: ``DAMAGED`` or ``STEPPED_BACK``.
        """
        if not self.folder.is_dir():
            return []
        names = (path.name for path in self.folder.iterdir() if path.name.startswith(prefix))
        return sorted(int(name.removeprefix(prefix)) for name in names if name.removeprefix(prefix).isdigit())

    def list_intact(self) -> list[int]:
        """Return the numbers of the undamaged checkpoints, ascending; they may belong to another run."""
        return [number for number in self.list_numbers() if self._read_manifest(number) is not None]

    def step_back(self) -> int:
        """Set the newest undamaged checkpoint aside, so that the run continues from the one before.

        Returns:
            Number of the checkpoint.

        Raises:
            CheckpointError: there is no undamaged checkpoint, or one cannot be renamed.
        """
        for number in reversed(self.list_numbers()):
            # A damaged checkpoint is none that the run could have continued from: it does not count as a step.
            is_intact = self._read_manifest(number) is not None
            self._set_aside(number, STEPPED_BACK if is_intact else DAMAGED)
            if is_intact:
                return number
        raise CheckpointError(f"{self.folder}: there is no checkpoint to step back from")

    def _set_aside(self, number: int, prefix: str) -> None:
        """Rename a checkpoint to ``<prefix><number>``.

        Raises:
            CheckpointError: it cannot be renamed.
        """
        # Under its number it would count as one of the newest: pruning would keep it in place of an intact one, and the
        # run could not write its own checkpoint of that number.
        path, aside = self.folder / f"{number:08d}", self.folder / f"{prefix}{number:08d}"
        try:
            # Evidence of an earlier restart: a folder cannot be renamed over one that is not empty.
            shutil.rmtree(aside, ignore_errors=True)
            path.replace(aside)
            sync_to_disk(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be renamed to {aside.name}: {error.strerror or error}. Remove it by hand"
            ) from error

    def _read_manifest(self, number: int) -> dict[str, Any] | None:
        """Return the manifest if the checksums of both files match; None for a damaged checkpoint."""
        # A damaged checkpoint is not an error: the run continues from the previous one and repeats a round.
        folder = self.folder / f"{number:08d}"
        try:
            manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
            sha256 = manifest.pop("sha256")
            is_intact = sha256 == _compute_digest(manifest) and manifest["tensors"] == compute_file_digest(
                folder / TENSORS
            )
            return manifest if is_intact else None
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError, SafetensorError):
            return None

    def _check_identity(self, manifest: Mapping[str, Any]) -> None:
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{self.folder}: written in format {manifest['format']}, this version reads {FORMAT}. Continue with "
                "the version that wrote it, or start again"
            )
        if differences := list(iterate_differences(manifest["belongs"], self.identity)):
            raise CheckpointError(
                f"{self.folder}: the checkpoint is of another job: {'; '.join(differences[:6])}. Continue with its "
                "settings, or start again in another folder"
            )


def iterate_differences(saved: Any, current: Any, path: str = "") -> Iterator[str]:
    """Yield the path and both values of each difference between two JSON values."""
    if isinstance(saved, dict) and isinstance(current, dict):
        for name in sorted(saved.keys() | current.keys()):
            yield from iterate_differences(saved.get(name), current.get(name), f"{path}.{name}".strip("."))
    elif saved != current:
        yield f"{path}: {saved!r} in the checkpoint, {current!r} now"


def _dump_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, with its own checksum."""
    return json.dumps({**manifest, "sha256": _compute_digest(manifest)}).encode()


def _compute_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def compute_file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
