"""The lower bound on epsilon equals that of the paper's program."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from thoroughness import count_cases

from flare_sparse.results.audit.membership import SHARES, bound_epsilon, compute_epsilon_bound, compute_p_value


def compute_paper_p_value(m: int, r: int, v: int, eps: float, delta: float) -> float:
    """The program of arXiv:2305.08846, appendix D."""
    q = 1 / (1 + math.exp(-eps))
    beta = binom.sf(v - 1, r, q)
    alpha, total = 0.0, 0.0
    for i in range(1, v + 1):
        total += binom.pmf(v - i, r, q)
        if total > i * alpha:
            alpha = total / i
    return min(beta + alpha * delta * 2 * m, 1)


@settings(max_examples=count_cases(60), deadline=None)
@given(st.data(), st.integers(1, 60), st.floats(0, 6), st.sampled_from([0.0, 1e-6, 1e-3]))
def test_p_value_is_that_of_the_papers_program(data: st.DataObject, m: int, epsilon: float, delta: float) -> None:
    r = data.draw(st.integers(0, m))
    v = data.draw(st.integers(0, r))
    assert compute_p_value(m, r, v, epsilon, delta) == pytest.approx(
        compute_paper_p_value(m, r, v, epsilon, delta), abs=1e-12
    )


def test_all_correct_guesses_give_the_closed_form() -> None:
    # q ** r = 0.05, and epsilon = log(q / (1 - q)).
    q = 0.05 ** (1 / 100)
    assert compute_epsilon_bound(100, 100, 100, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)


@pytest.mark.parametrize(("guesses", "correct"), [(100, 50), (100, 58), (10, 8), (0, 0)])
def test_guesses_that_chance_explains_prove_nothing(guesses: int, correct: int) -> None:
    assert compute_epsilon_bound(100, guesses, correct, 0.0) == 0.0


def test_delta_lowers_the_bound() -> None:
    assert compute_epsilon_bound(100, 50, 48, 1e-4) < compute_epsilon_bound(100, 50, 48, 0.0)


def test_planted_leak_exceeds_a_small_claim() -> None:
    is_included = np.arange(200) % 2 == 0
    bound = bound_epsilon(is_included.astype(float), is_included, 0.0)
    level = 0.05 / len(SHARES)
    q = level ** (1 / 200)
    assert (bound.guesses, bound.correct) == (200, 200)
    assert bound.epsilon == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    assert bound.epsilon > 3


@pytest.mark.slow
def test_scores_without_information_stay_below_any_claim() -> None:
    bounds = []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        bounds.append(bound_epsilon(generator.normal(size=100), generator.random(100) < 0.5, 0.0).epsilon)
    # At most 5 % of the audits of a model without a leak may find one.
    assert sum(epsilon > 0 for epsilon in bounds) <= 10


def test_randomised_response_is_bounded_by_its_epsilon() -> None:
    generator, epsilon = np.random.default_rng(5), 1.0
    is_included = generator.random(2000) < 0.5
    is_kept = generator.random(2000) < 1 / (1 + math.exp(-epsilon))
    bound = bound_epsilon(np.where(is_kept, is_included, ~is_included).astype(float), is_included, 0.0)
    assert 0.5 < bound.epsilon < epsilon


def test_one_canary_proves_nothing() -> None:
    assert bound_epsilon(np.array([1.0]), np.array([True]), 0.0).epsilon == 0.0
