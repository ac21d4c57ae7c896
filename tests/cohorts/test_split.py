"""Split into training, validation and test: functions of the identifiers alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flare_sparse.cohorts.split import SplitConfig

IDS = st.sets(st.text(min_size=1, max_size=4))


@given(ids=IDS, seed=st.integers(0, 2**53), validation=st.sampled_from([0.0, 0.1, 0.5]), shuffle=st.randoms())
def test_split_is_complete_disjoint_and_independent_of_the_order(
    ids: set[str], seed: int, validation: float, shuffle: random.Random
) -> None:
    listed, config = sorted(ids), SplitConfig(validation=validation)
    split = config.assign(listed, seed)
    assert sorted(split.train + split.validation + split.test) == listed
    assert len(split.test) == max(round(0.2 * len(ids)), 1 if len(ids) > 1 else 0)
    assert bool(split.train) == bool(ids), "validation never takes the last training subject"
    shuffle.shuffle(listed)
    assert config.assign(listed, seed) == split


@given(ids=IDS, seed=st.integers(0, 2**53), folds=st.integers(2, 7), validation=st.sampled_from([0.0, 0.1]))
def test_every_subject_is_tested_in_exactly_one_fold(ids: set[str], seed: int, folds: int, validation: float) -> None:
    splits = [
        SplitConfig(folds=folds, fold=fold, validation=validation).assign(ids, seed) for fold in range(1, folds + 1)
    ]
    assert sorted(name for split in splits for name in split.test) == sorted(ids)
    assert all(sorted(split.train + split.validation + split.test) == sorted(ids) for split in splits)
    sizes = [len(split.test) for split in splits]
    assert max(sizes) - min(sizes) <= 1


def test_split_of_a_seed_never_changes() -> None:
    ids = [f"sub-{i:02d}" for i in range(10)]
    split = SplitConfig().assign(ids, 0)
    train, test = split.train, split.test
    assert test == ("sub-05", "sub-02")
    assert SplitConfig().assign(ids, 1).test != test
    with_validation = SplitConfig(validation=0.2).assign(ids, 0)
    assert (with_validation.validation, with_validation.train, with_validation.test) == (train[:2], train[2:], test)
    assert SplitConfig(folds=5).assign(ids, 0).test == test, "the first of five folds is the split of one run"


def test_single_subject_is_for_training() -> None:
    split = SplitConfig().assign(["a"], 0)
    assert (split.train, split.test) == (("a",), ())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fold": 2}, "folds is not set"),
        ({"folds": 3, "fold": 4}, "expected 1 to 3"),
        ({"test": 0.5, "validation": 0.5}, "leave no subject for training"),
        ({"folds": 2, "validation": 0.5}, "leave no subject for training"),
    ],
)
def test_impossible_split_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SplitConfig.model_validate(settings)
