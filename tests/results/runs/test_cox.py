"""Cox regression: the partial likelihood and its gradient; coefficients and C-index equal to those of lifelines."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from lifelines import CoxPHFitter
from lifelines.utils import concordance_index
from scipy.optimize import approx_fprime

from flare_sparse.results.runs.baselines import compute_partial_loss, fit_cox
from flare_sparse.tasks.outcomes import compute_c_index


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


def test_loss_and_gradient_of_a_subject_far_from_all_others_are_finite() -> None:
    """The last one alone is at risk at its own event, and its hazard is below the smallest number of float64."""
    eta, times, events = np.array([0.0, 3.0, -800.0]), np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.0, 1.0])
    loss, gradient = compute_partial_loss(eta, times, events)
    assert loss == pytest.approx(np.log(1 + np.exp(3.0)))
    share = 1 / (1 + np.exp(3.0))
    assert gradient == pytest.approx([share - 1, 1 - share, 0.0])


# lifelines' own use of pandas.
@pytest.mark.filterwarnings("ignore:Starting with pandas version 4.0")
@pytest.mark.parametrize("penalty", [0.1, 10.0, 1000.0])
def test_coefficients_equal_those_of_lifelines(penalty: float) -> None:
    """Without ties: for them, lifelines has Efron's form. It divides the penalty by n."""
    draw = np.random.default_rng(6)
    x = draw.normal(size=(300, 5))
    times, events = draw.exponential(np.exp(-x[:, 0])), (draw.random(300) < 0.7).astype(float)
    table = pd.DataFrame(x, columns=list("abcde")).assign(time=times, event=events)
    # lifelines standardises by the sample's deviation, and penalises the coefficients of the standardised columns.
    model = CoxPHFitter(penalizer=penalty / 300 / x.std(axis=0, ddof=1) ** 2)
    model.fit(table, "time", "event", fit_options={"precision": 1e-12})
    assert fit_cox(x, times, events, penalty) == pytest.approx(model.params_.to_numpy(), abs=1e-6)


def test_c_index_equals_that_of_lifelines_with_ties_of_times_and_of_hazards() -> None:
    for seed in range(20):
        _, times, events = draw_subjects(60, seed)
        times, hazard = np.ceil(times / 20), np.round(np.random.default_rng(seed).normal(size=60), 1)
        found = compute_c_index(*map(torch.as_tensor, (hazard, times, events)))
        assert found == pytest.approx(concordance_index(times, -hazard, events), rel=1e-12)
