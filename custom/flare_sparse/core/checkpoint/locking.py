"""A lock on a folder: held until it is released or its process ends, even by a crash."""

import fcntl
import os
import time
from pathlib import Path

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
