"""Cox regression: the partial likelihood, its gradient, and coefficients that are found again."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from flare_sparse.results.runs.cox import compute_partial_loss, fit_cox


def draw_subjects(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, times (with ties) and events of subjects whose hazard is exp(x0 - 0.5 x1)."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 3))
    times = np.ceil(draw.exponential(np.exp(-x[:, 0] + 0.5 * x[:, 1])) * 50)
    return x, times, (draw.random(count) < 0.8).astype(float)


def test_loss_is_the_sum_over_events_written_out() -> None:
    _, times, events = draw_subjects(40, 1)
    eta = np.random.default_rng(2).normal(size=40)
    expected = sum(
        np.log(np.exp(eta[times >= times[i]]).sum()) - eta[i] for i in range(40) if events[i]
    )  # fmt: skip
    assert compute_partial_loss(eta, times, events)[0] == pytest.approx(expected)


def test_gradient_is_the_derivative() -> None:
    _, times, events = draw_subjects(30, 3)
    times = np.round(times / 20)
    eta = np.random.default_rng(4).normal(size=30)
    numeric = approx_fprime(eta, lambda value: compute_partial_loss(value, times, events)[0], 1e-7)
    assert compute_partial_loss(eta, times, events)[1] == pytest.approx(numeric, abs=1e-4)


def test_coefficients_are_found_again_and_shrink_with_the_penalty() -> None:
    x, times, events = draw_subjects(3000, 5)
    assert fit_cox(x, times, events, 0.1) == pytest.approx([1.0, -0.5, 0.0], abs=0.1)
    assert np.abs(fit_cox(x, times, events, 1e6)).max() < 0.01
