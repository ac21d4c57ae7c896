"""Writes that are complete and on disk when the call returns, also after a loss of power."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_new_file(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk.

    Raises:
        OSError: the file exists already, or could not be written.
    """
    # Readable by the owner only: checkpoints hold models and residuals of private data.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        remaining = memoryview(data)
        # A write may be short, for example when the disk is nearly full.
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
        os.fsync(file)
    finally:
        os.close(file)


def sync_to_disk(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk.

    Raises:
        OSError: the disk reported an error.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` at the end: a reader finds either the old content or the new one.

    Raises:
        OSError: the file could not be written; ``path`` has its old content.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        sync_to_disk(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    # The rename is a change of the folder: without this flush, a loss of power could undo it.
    sync_to_disk(path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file, completely or not at all."""
    with replace_atomically(path) as part:
        part.write_text(json.dumps(content, indent=2, sort_keys=False) + "\n")
