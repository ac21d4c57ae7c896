"""Accounting: equal to the accountant of Opacus, however the steps are cut into rounds, retries and restarts."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant

from flare_sparse.core.errors import ConfigError
from flare_sparse.privacy.dp.accounting import (
    Charge,
    SamplingPlan,
    _fits,
    compute_epsilon,
    merge_charges,
    solve_noise_multiplier,
)

DELTA = 1e-5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning")
def test_epsilon_is_that_of_the_prv_accountant_in_random_settings() -> None:
    draw = random.Random(3)
    for _ in range(6):
        charges = [
            Charge(draw.uniform(1.5, 6.0), draw.uniform(0.01, 0.4), draw.randrange(1, 200))
            for _ in range(draw.randrange(1, 3))
        ]
        delta = 10 ** -draw.uniform(3, 6)
        accountant = PRVAccountant()
        for charge in charges:
            for _ in range(charge.steps):
                accountant.step(noise_multiplier=charge.noise_multiplier, sample_rate=charge.sample_rate)
        # The convolution of two histories in another order differs in the last bits.
        assert compute_epsilon(charges, delta) == pytest.approx(accountant.get_epsilon(delta), rel=1e-6)


def test_every_subject_in_every_step_is_accounted_by_renyi_divergence() -> None:
    accountant = RDPAccountant()
    accountant.history = [(5.0, 1.0, 60)]
    assert compute_epsilon([Charge(5.0, 1.0, 60)], DELTA) == accountant.get_epsilon(DELTA)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning")
@pytest.mark.parametrize("noise_multiplier", [0.2, 1e-4])
def test_tiny_noise_is_accounted_without_a_huge_grid(noise_multiplier: float) -> None:
    # The grid of the PRV accountant would have 4e7 and 1e15 points.
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, 0.12, 720)]
    assert compute_epsilon([Charge(noise_multiplier, 0.12, 720)], DELTA) == accountant.get_epsilon(DELTA) > 1000


def test_grid_has_the_points_of_theorem_5_5_and_the_largest_one_still_fits() -> None:
    # Epsilon 1 on either side of 0, in steps of 0.01 / sqrt(4 * 18 / 2).
    renyi = SimpleNamespace(history=[(1.0, 0.1, 3), (2.0, 0.1, 1)], get_epsilon=lambda delta: 1.0)
    assert [_fits(renyi, 12_000 * math.exp(-18), points) for points in (1199, 1200)] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1000.0, 1e6])
def test_noise_of_a_large_budget_is_found(epsilon: float) -> None:
    plan = SamplingPlan.build(1000, 50, 1, 2)
    sigma = solve_noise_multiplier(epsilon, DELTA, plan)
    assert 0.9 * epsilon < compute_epsilon([plan.build_charge(sigma, 2)], DELTA) <= epsilon


@pytest.mark.slow
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.randoms())
@settings(max_examples=4, deadline=None)
def test_steps_in_any_order_and_any_portions_are_one_long_accountant(portions: list[int], order: random.Random) -> None:
    charges = [Charge(3.0, 0.1, steps) for steps in portions] + [Charge(2.0, 0.1, 7)]
    order.shuffle(charges)
    assert merge_charges(charges) == (Charge(2.0, 0.1, 7), Charge(3.0, 0.1, sum(portions)))
    whole = compute_epsilon([Charge(2.0, 0.1, 7), Charge(3.0, 0.1, sum(portions))], DELTA)
    assert compute_epsilon(charges, DELTA) == whole


def test_nothing_charged_costs_nothing() -> None:
    assert compute_epsilon([], DELTA) == compute_epsilon([Charge(1.0, 0.5, 0)], DELTA) == 0


@pytest.mark.long
@pytest.mark.parametrize(("epsilon", "subjects", "batch_size"), [(3.0, 100, 16), (1.0, 412, 32), (8.0, 20, 32)])
def test_solved_noise_keeps_the_budget_and_little_less_would_not(
    epsilon: float, subjects: int, batch_size: int
) -> None:
    plan = SamplingPlan.build(subjects, batch_size, 2, 20)
    sigma = solve_noise_multiplier(epsilon, DELTA, plan)
    assert compute_epsilon([plan.build_charge(sigma, 20)], DELTA) <= epsilon
    assert compute_epsilon([plan.build_charge(0.97 * sigma, 20)], DELTA) > epsilon


def test_plan_draws_every_subject_once_per_epoch_on_average() -> None:
    plan = SamplingPlan.build(100, 16, 3, 1)
    assert (plan.sample_rate, plan.steps) == (0.16, 21)
    small = SamplingPlan.build(5, 16, 3, 1)
    assert (small.lot_size, small.sample_rate, small.steps) == (5, 1.0, 3)
    assert SamplingPlan.build(100, 8, 1, 1, accumulate=4).lot_size == 32


def test_budget_that_no_noise_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.epsilon 0\.05 .* no noise keeps it over 500000 steps"):
        solve_noise_multiplier(0.05, 1e-12, SamplingPlan.build(10, 10, 50, 10_000))
