"""Damage to checkpoints on disk, by name; any test may import this module."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from flare_sparse.core.checkpoint.store import MANIFEST, TENSORS


def _flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "file dropped": lambda folder: (folder / TENSORS).unlink(),
    "file truncated": lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-8]),
    "byte flipped": lambda folder: _flip_byte(folder / TENSORS),
    "manifest flipped": lambda folder: _flip_byte(folder / MANIFEST),
    "manifest emptied": lambda folder: (folder / MANIFEST).write_bytes(b""),
}
"""By name: changes the files in the folder of one checkpoint."""


def copy_folder(source: Path, target: Path) -> Path:
    """Copy a folder of checkpoints and return the copy."""
    shutil.copytree(source, target)
    return target
