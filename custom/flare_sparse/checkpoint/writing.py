"""Files that are on the disk when a call returns, whole, also if the power goes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_new_file(path: Path, data: bytes) -> None:
    """All of it, on the disk when this returns.

    Raises:
        OSError: there is such a file already, or it could not be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def sync_to_disk(path: Path) -> None:
    """What is in a file, or the names in a folder, on the disk.

    Raises:
        OSError: the disk refuses.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """A name to write to; afterwards it is ``path``, on the disk: a reader finds the old content or the new.

    Raises:
        OSError: it could not be written; the old content is as it was.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        sync_to_disk(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole and on the disk, or not at all."""
    with replace_atomically(path) as part:
        part.write_text(json.dumps(content, indent=2, sort_keys=False) + "\n")
