"""Which configurations and which rows of a test run by default; the others are long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import pytest

JOBS = {folder.name for folder in (Path(__file__).parents[2] / "jobs").iterdir()}
"""Configurations of the repository's jobs; the others are long."""
DEFAULT_ROWS = 2


def mark_rows(items: Iterable[pytest.Item]) -> None:
    """Mark all but a few rows of every slow test as long: all but 2, or ``@pytest.mark.slow(rows=...)``.

    The rows that stay are the first by a checksum of their names, so that two tests over the same methods or number
    formats run different ones.
    """
    rows = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("long"):
            rows[item.nodeid.partition("[")[0]].append(item)
    for test in rows.values():
        ordered = sorted(test, key=lambda item: crc32(item.nodeid.encode()))
        slow = ordered[0].get_closest_marker("slow")
        assert slow is not None
        for item in ordered[slow.kwargs.get("rows", DEFAULT_ROWS) :]:
            item.add_marker(pytest.mark.long)
