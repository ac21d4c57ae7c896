"""Screening of subjects."""

from __future__ import annotations

import pytest

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.data.screening import screen_subjects


def read(name: str) -> int:
    if not name.isdecimal():
        raise DataError(f"{name!r} is no number")
    return int(name)


def test_error_lists_all_unusable_subjects() -> None:
    with pytest.raises(DataError) as caught:
        screen_subjects(["1", "a", "b"], read, skip_bad_subjects=False, source="here")
    assert str(caught.value) == (
        "here: 2 of 3 subjects cannot be used:\n  a: 'a' is no number\n  b: 'b' is no number\n"
        "Repair or remove them, or set task.skip_bad_subjects: true."
    )


def test_unusable_subjects_are_skipped_and_counted_on_request() -> None:
    assert screen_subjects(["1", "a", "2"], read, skip_bad_subjects=True, source="here") == (
        {"1": 1, "2": 2},
        ["a: 'a' is no number"],
    )


@pytest.mark.parametrize(("ids", "message"), [(["a"], "1 of 1 subjects cannot be used"), ([], "there are no subjects")])
def test_at_least_one_usable_subject_is_required(ids: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        screen_subjects(ids, read, skip_bad_subjects=True, source="here")
