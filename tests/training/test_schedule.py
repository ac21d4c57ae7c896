"""Learning rate over the rounds of a run (docs/algorithms.md, section 1.8)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.training import TrainingConfig
from flare_sparse.training.config import LearningRateSchedule


def compute_factors(rounds: int, **settings: Any) -> list[float]:
    schedule = LearningRateSchedule.model_validate(settings)
    return [schedule.compute_factor(t, rounds) for t in range(1, rounds + 1)]


def test_cosine_starts_at_one_and_does_not_reach_its_end() -> None:
    expected = [(1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]
    assert compute_factors(4, kind="cosine") == pytest.approx(expected)
    assert compute_factors(4, kind="cosine", final=0.5) == pytest.approx([(1 + f) / 2 for f in expected])


def test_rate_rises_linearly_over_the_warmup_and_is_full_after_it() -> None:
    assert compute_factors(8, warmup=0.25) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1])
    cosine = compute_factors(8, kind="cosine", warmup=0.25)
    assert cosine == pytest.approx([1 / 3, 2 / 3, *compute_factors(6, kind="cosine")])


def test_fine_tuning_after_the_last_round_has_its_rate() -> None:
    schedule = LearningRateSchedule(kind="cosine")
    assert schedule.compute_factor(5, 4) == schedule.compute_factor(4, 4) > 0
    assert schedule.compute_factor(0, 4) == schedule.compute_factor(1, 4)


@given(
    st.sampled_from(["constant", "cosine", "poly"]),
    st.floats(0, 0.99),
    st.integers(1, 60),
    st.floats(0, 1),
)
def test_every_round_has_a_positive_rate_of_at_most_the_base(
    kind: str, warmup: float, rounds: int, final: float
) -> None:
    factors = compute_factors(rounds, kind=kind, warmup=warmup, final=final)
    assert all(0 < factor <= 1 for factor in factors)


def test_settings_of_a_round_hold_its_rate_and_no_schedule() -> None:
    config = TrainingConfig.model_validate({"lr": 0.1, "lr_decay": 0.5, "schedule": {"kind": "cosine"}})
    assert config.resolve_schedule(3, 4).compute_learning_rate(3) == pytest.approx(0.1 * 0.5 * 0.25)
    constant = TrainingConfig(lr=0.1)
    assert constant.resolve_schedule(3, 4) is constant
