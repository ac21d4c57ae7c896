"""Schedules (docs/algorithms.md, section 2.4 and 6.3): vectors 1 and 9 of section 8, and corner cases."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.methods.support.schedules import compute_polynomial_sparsity, compute_step_sizes


def test_sparsities_equal_those_of_the_paper() -> None:
    """Vector 1."""
    wanted = {
        1: 0.0, 2: 0.07121917092331298, 3: 0.13878689795849564, 5: 0.26335238287900997, 10: 0.5175921711424671,
        20: 0.8218791618199902, 30: 0.9339848952274987, 39: 0.9499839848952275, 40: 0.95,
    }  # fmt: skip
    for t, value in wanted.items():
        assert compute_polynomial_sparsity(t, start=0, end=0.95, first=1, last=40) == pytest.approx(value, abs=1e-12)


@given(
    st.integers(1, 50), st.integers(1, 10), st.integers(1, 8), st.floats(0, 0.9), st.floats(0, 0.09), st.floats(1, 5)
)
def test_sparsity_rises_from_start_to_end_in_steps_of_f_rounds(
    length: int, first: int, every: int, start: float, rise: float, exponent: float
) -> None:
    end, last = start + rise, first + length
    curve = [
        compute_polynomial_sparsity(t, start=start, end=end, first=first, last=last, exponent=exponent, every=every)
        for t in range(1, last + 1)
    ]
    assert all(a <= b + 1e-12 for a, b in pairwise(curve))
    assert all(start - 1e-12 <= value <= end + 1e-12 for value in curve)
    assert curve[: first - 1] == [start] * (first - 1)
    if every == 1:
        assert curve[first - 1] == pytest.approx(start, abs=1e-12)
    if last % every == 0:
        assert curve[-1] == end
    for t in range(every, last):
        if t % every:
            assert curve[t - 1] == curve[t - t % every - 1]


def test_exponent_one_is_linear_and_a_single_round_is_one_shot() -> None:
    assert compute_polynomial_sparsity(6, start=0, end=0.5, first=1, last=11, exponent=1) == pytest.approx(0.25)
    assert compute_polynomial_sparsity(1, start=0, end=0.5, first=1, last=1) == 0.5
    assert compute_polynomial_sparsity(3, start=0, end=0.5, first=5, last=5) == 0


@pytest.mark.parametrize("wrong", [{"start": 0.5, "end": 0.4}, {"end": 1.0}, {"every": 0}, {"first": 0}])
def test_impossible_schedule_is_refused(wrong: dict[str, float]) -> None:
    settings = {"start": 0.0, "end": 0.5, "first": 1, "last": 9, "every": 1, **wrong}
    with pytest.raises(ValueError, match="must"):
        compute_polynomial_sparsity(2, **settings)  # type: ignore[arg-type]


def test_step_sizes_of_the_first_rounds_equal_the_worked_numbers() -> None:
    """Vector 9."""
    steps = [compute_step_sizes(t) for t in range(1, 6)]
    assert [s.alpha for s in steps] == pytest.approx([1, 2 / 3, 1 / 2, 2 / 5, 1 / 3])
    assert [s.eta for s in steps] == pytest.approx([1, 1.5, 2, 2.5, 3])
    gamma = [1.0]
    for s in steps[1:]:
        gamma.append((1 - s.alpha) * gamma[-1])
    assert gamma == pytest.approx([1, 1 / 3, 1 / 6, 1 / 10, 1 / 15])
    momentum = [
        after.alpha * (1 / before.alpha - 1) for before, after in pairwise([compute_step_sizes(t) for t in range(1, 7)])
    ]
    assert momentum == pytest.approx([0, 1 / 4, 2 / 5, 1 / 2, 4 / 7])


@given(st.integers(1, 1000), st.floats(0.1, 3), st.floats(0, 1))
def test_step_sizes_satisfy_their_relations(t: int, beta: float, cap: float) -> None:
    """alpha_t eta_t = beta_t always; by default Gamma_t = 2 / (t (t + 1)) and momentum (t - 1) / (t + 2)."""
    now, after = (compute_step_sizes(s, beta=beta, momentum_cap=cap) for s in (t, t + 1))
    assert now.alpha * now.eta == pytest.approx(now.beta) == pytest.approx(beta)
    assert after.alpha * (1 / now.alpha - 1) <= cap + 1e-12
    plain, following = compute_step_sizes(t), compute_step_sizes(t + 1)
    assert following.alpha * (1 / plain.alpha - 1) == pytest.approx((t - 1) / (t + 2))
    gamma_ratio = 1 - following.alpha
    assert gamma_ratio * 2 / (t * (t + 1)) == pytest.approx(2 / ((t + 1) * (t + 2)))
