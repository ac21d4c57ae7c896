"""How many random cases a property is tried in: all of them with CI=true, a fifth otherwise."""

from __future__ import annotations

from skips import runs_in_ci


def count_cases(number: int) -> int:
    """Return the number of cases of this run, of the ``number`` that CI tries."""
    return number if runs_in_ci() else max(1, number // 5)
