"""The disk of a result folder: how much is free, and the error of one that is full."""

import shutil
from pathlib import Path

LEAST_FREE = 10_000_000
"""Bytes that must be free in the result folder before a run starts."""


def describe_disk(path: Path, free: int | None) -> str:
    """Return which disk is full, for which path, and how many bytes are free."""
    mount = path.resolve()
    while not mount.is_mount():
        mount = mount.parent
    return (
        f"the disk {mount} is full: {'?' if free is None else f'{free:,}'} bytes free for {path}. Free some space, or "
        "choose another --out"
    )


def measure_free(path: Path) -> int | None:
    """Return the free bytes of the disk of a path that may not exist yet; None: it cannot be told."""
    folder = path.resolve()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
