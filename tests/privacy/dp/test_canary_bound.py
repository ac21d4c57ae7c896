"""The lower bound on epsilon equals that of the paper's program."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from scripts import load_script
from thoroughness import count_cases
from torch.utils.data import TensorDataset

bound: Any = load_script("experiments/canary_bound")
bound_epsilon, compute_epsilon_bound, compute_p_value = (
    bound.bound_epsilon, bound.compute_epsilon_bound, bound.compute_p_value
)  # fmt: skip


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
    found = bound_epsilon(is_included.astype(float), is_included, 0.0)
    level = 0.05 / len(bound.SHARES)
    q = level ** (1 / 200)
    assert (found.guesses, found.correct) == (200, 200)
    assert found.epsilon == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    assert found.epsilon > 3


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
    found = bound_epsilon(np.where(is_kept, is_included, ~is_included).astype(float), is_included, 0.0)
    assert 0.5 < found.epsilon < epsilon


def test_one_canary_proves_nothing() -> None:
    assert bound_epsilon(np.array([1.0]), np.array([True]), 0.0).epsilon == 0.0


def test_canaries_have_the_targets_of_other_examples() -> None:
    x = torch.arange(20.0)
    canaries = bound.Canaries(TensorDataset(x, 100 + x, 200 + x), [3, 5, 8, 13], seed=1)
    pairs = [(example[0].item(), example[1].item()) for example in (canaries[i] for i in range(len(canaries)))]
    assert [own for own, _ in pairs] == [3, 5, 8, 13]
    assert sorted(target for _, target in pairs) == [103, 105, 108, 113]
    assert all(target != 100 + own for own, target in pairs)
    # What belongs to the target, such as its weight in the loss, goes with it.
    assert all(example[2].item() == example[1].item() + 100 for example in (canaries[i] for i in range(4)))


def test_examples_without_targets_cannot_be_canaries() -> None:
    with pytest.raises(TypeError, match="Tensor"):
        bound.Canaries(torch.zeros(4, 2), [0, 1], seed=0)
