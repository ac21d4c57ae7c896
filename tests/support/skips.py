"""Tests that need more than the repository: skipped on a user's machine with the way to run them, failed in CI."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest


def runs_in_ci() -> bool:
    """Return whether CI runs the tests, with all that they need and in every case."""
    return os.environ.get("CI") == "true"


def require(is_available: bool, reason: str) -> None:
    """Skip the test unless ``is_available``; in CI, where everything must be present, fail it."""
    if is_available:
        return
    if runs_in_ci():
        pytest.fail(reason)
    pytest.skip(reason)


def describe_skips(reasons: Sequence[str]) -> str:
    """Return one line: how many tests were skipped, and what each group needs; empty if none was.

    >>> describe_skips(["Skipped: a cat is needed: buy one", "Skipped: a cat is needed: buy one"])
    '2 tests were skipped (2: a cat is needed: buy one)'
    """
    groups = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    if not groups:
        return ""
    tests = "1 test was" if len(reasons) == 1 else f"{len(reasons)} tests were"
    return f"{tests} skipped ({'; '.join(f'{count}: {reason}' for reason, count in groups.most_common())})"
