"""Split into training and test, and screening of subjects: functions of the identifiers alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.data.screening import screen_subjects
from flare_sparse.data.split import split_train_test
from flare_sparse.errors import DataError


@given(ids=st.sets(st.text(min_size=1, max_size=4)), seed=st.integers(0, 2**53), shuffle=st.randoms())
def test_split_is_complete_disjoint_and_independent_of_the_order(ids: set[str], seed: int, shuffle: object) -> None:
    listed = sorted(ids)
    train, test = split_train_test(listed, seed)
    assert sorted(train + test) == listed
    assert len(test) == max(round(0.2 * len(ids)), 1 if len(ids) > 1 else 0)
    shuffle.shuffle(listed)  # type: ignore[attr-defined]
    assert split_train_test(listed, seed) == (train, test)


def test_split_of_a_seed_never_changes() -> None:
    ids = [f"sub-{i:02d}" for i in range(10)]
    assert split_train_test(ids, 0)[1] == ("sub-05", "sub-02")
    assert split_train_test(ids, 1)[1] != split_train_test(ids, 0)[1]


def test_single_subject_is_for_training() -> None:
    assert split_train_test(["a"], 0) == (("a",), ())


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
    assert screen_subjects(["1", "a", "2"], read, skip_bad_subjects=True, source="here") == ({"1": 1, "2": 2}, 1)


@pytest.mark.parametrize(("ids", "message"), [(["a"], "1 of 1 subjects cannot be used"), ([], "there are no subjects")])
def test_at_least_one_usable_subject_is_required(ids: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        screen_subjects(ids, read, skip_bad_subjects=True, source="here")
