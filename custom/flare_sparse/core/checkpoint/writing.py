"""Writes that are complete and on disk when the call returns, also after a loss of power; and a lock on a folder."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any


def write_new_file(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk.

    Raises:
        OSError: the file exists already, or could not be written.
    """
    # Readable by the owner only: checkpoints hold models and residuals of private data.
    with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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


LOCK = ".lock"
RETRY_S = 0.1


def lock_folder(folder: Path, patience_s: float = 0.0) -> int:
    """Lock a folder, which is created if it does not exist, and return the descriptor; closing it releases the lock.

    Args:
        folder: the folder.
        patience_s: seconds to wait for another process that holds the lock.

    Raises:
        OSError: another process holds the lock (``BlockingIOError``), or the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
    deadline = time.monotonic() + patience_s
    while True:
        # The kernel releases this lock with the process: a killed job leaves none behind, as a file with a pid would.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() >= deadline:
                os.close(lock)
                raise
        time.sleep(RETRY_S)
