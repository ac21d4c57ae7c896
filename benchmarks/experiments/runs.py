"""Parts that the experiments share: their configurations, and which process writes a file."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "app_configs"


@contextmanager
def claim(file: Path) -> Iterator[bool]:
    """Yield whether this process is to write the file: it is missing and no other process writes it.

    The lock ends with its process, so that a killed run can start again.
    """
    with file.with_suffix(".claimed").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield not file.exists()
