"""No test is skipped without a word at the end, and none is skipped in CI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from skips import describe_skips, require

TESTS = Path(__file__).parent


def test_missing_requirement_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="a cat is needed"):
        require(False, "a cat is needed")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="a cat is needed"):
        require(False, "a cat is needed")
    require(True, "a cat is needed")


def test_every_skip_goes_through_the_one_place_that_fails_in_ci() -> None:
    others = [path for path in TESTS.rglob("*.py") if path.name not in ("skips.py", "test_skips.py")]
    pattern = re.compile(r"pytest\.skip|skipif|mark\.skip|importorskip")
    assert [path.name for path in others if pattern.search(path.read_text())] == []


def test_skipped_tests_are_counted_by_reason_in_one_line() -> None:
    reasons = ["Skipped: b is needed", "Skipped: a is needed: get a", "Skipped: b is needed"]
    assert describe_skips(reasons) == "3 tests were skipped (2: b is needed; 1: a is needed: get a)"
    assert describe_skips(reasons[:1]) == "1 test was skipped (1: b is needed)"
    assert describe_skips([]) == ""
