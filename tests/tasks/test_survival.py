"""Survival: losses and metrics equal to lifelines' and to values of scikit-survival 0.28, whose licence is the GPL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lifelines import KaplanMeierFitter, WeibullFitter
from torch import Tensor

from flare_sparse.core.ranking import estimate_survival
from flare_sparse.tasks.outcomes import (
    SurvivalOutcome,
    compute_brier_scores,
    compute_c_index,
    compute_cox_loss,
    compute_discrete_loss,
    compute_weibull_loss,
    cumulate_weibull,
    integrate,
)

# lifelines' own use of pandas.
pytestmark = pytest.mark.filterwarnings("ignore:Starting with pandas version 4.0")
ENDS = torch.tensor([3.0, 6, 10, 15])


def draw_subjects() -> tuple[Tensor, Tensor, Tensor]:
    """Return times with ties and events of 40 subjects, and falling probabilities ``(40, 4)`` at ``ENDS``."""
    draw = np.random.default_rng(7)
    times, events = np.ceil(draw.exponential(10, 40)), draw.random(40) < 0.6
    survival = np.sort(draw.random((40, 4)), axis=1)[:, ::-1].copy()
    return torch.as_tensor(times.clip(1, 30)), torch.as_tensor(events).double(), torch.as_tensor(survival)


def test_cox_loss_equals_the_partial_likelihood_written_out() -> None:
    eta, times, events = (torch.tensor(v) for v in ([0.5, -1.0, 2.0, 0.0], [3.0, 1.0, 3.0, 2.0], [1.0, 1.0, 0.0, 0.0]))
    first = math.log(sum(math.exp(value) for value in eta.tolist())) + 1.0
    second = math.log(math.exp(0.5) + math.exp(2.0)) - 0.5
    assert compute_cox_loss(eta, times, events).item() == pytest.approx((first + second) / 2)
    without = compute_cox_loss(eta.requires_grad_(), times, torch.zeros(4))
    without.backward()
    assert without.item() == 0
    assert eta.grad is not None
    assert not eta.grad.any()


def test_c_index_counts_pairs_that_can_be_compared() -> None:
    times, events = torch.tensor([1.0, 2, 3, 3]), torch.tensor([1.0, 0, 1, 0])
    assert compute_c_index(torch.tensor([3.0, 0, 1, 0]), times, events) == 1
    assert compute_c_index(torch.tensor([0.0, 3, 1, 0]), times, events) == pytest.approx(1.5 / 4)
    assert compute_c_index(torch.zeros(4), times, torch.zeros(4)) is None


def test_discrete_loss_equals_the_likelihood_written_out() -> None:
    """Hazards 0.2 and 0.5 of the intervals (0, 3] and (3, 6]."""
    logits = torch.tensor([0.2, 0.5]).logit()
    cases = {
        (2.0, 1.0): 0.2, (3.0, 1.0): 0.2, (4.0, 1.0): 0.8 * 0.5, (9.0, 1.0): 0.8 * 0.5, (2.0, 0.0): 1.0,
        (3.0, 0.0): 0.8, (5.0, 0.0): 0.8, (6.0, 0.0): 0.8 * 0.5,
    }  # fmt: skip
    for (time, event), likelihood in cases.items():
        loss = compute_discrete_loss(logits[None], torch.tensor([time]), torch.tensor([event]), ENDS[:2])
        assert loss.item() == pytest.approx(-math.log(likelihood), abs=1e-6), (time, event)
    times, events = (torch.tensor(column) for column in zip(*cases, strict=True))
    together = compute_discrete_loss(logits.expand(8, 2), times, events, ENDS[:2])
    assert together.item() == pytest.approx(-sum(map(math.log, cases.values())) / 8)


def test_discrete_hazards_of_the_least_loss_are_those_of_kaplan_and_meier() -> None:
    """Intervals of one unit, so that every time is the end of one."""
    times, events, _ = draw_subjects()
    ends = torch.arange(1.0, 16, dtype=torch.float64)
    logits = torch.zeros(15, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = compute_discrete_loss(logits.expand(len(times), -1), times, events, ends)
        loss.backward()
        return loss

    optimizer.step(compute)
    expected = KaplanMeierFitter().fit(times, events).predict(ends.numpy()).to_numpy()
    assert torch.sigmoid(-logits.detach()).cumprod(0).numpy() == pytest.approx(expected, abs=1e-4)


def test_weibull_likelihood_and_survival_equal_those_of_lifelines() -> None:
    times, events, _ = draw_subjects()
    model = WeibullFitter().fit(times, events)
    outputs = torch.tensor([[math.log(model.lambda_), math.log(model.rho_)]], dtype=torch.float64)
    outputs.requires_grad_()
    loss = compute_weibull_loss(outputs.expand(len(times), -1), times, events)
    assert loss.item() * len(times) == pytest.approx(-model.log_likelihood_, rel=1e-12)
    loss.backward()
    assert outputs.grad is not None
    assert outputs.grad.abs().max().item() == pytest.approx(0, abs=1e-5)
    survival = torch.exp(-cumulate_weibull(outputs.detach(), ENDS.double()))[0]
    expected = model.survival_function_at_times(ENDS.double().numpy()).to_numpy()
    assert survival.numpy() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", ["discrete", "weibull"])
def test_probabilities_are_those_of_the_loss_and_the_risk_ranks_by_them(loss: str) -> None:
    """The derivative of the loss of a subject that was seen until T is that of its cumulative hazard at T."""
    outcome = SurvivalOutcome("months", "died", loss, ENDS.tolist())  # type: ignore[arg-type]
    outputs = torch.randn(6, outcome.outputs, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    predictions = outcome.predict(outputs)
    assert predictions.shape == (6, 5)
    for column, end in enumerate(ENDS.tolist()):
        seen = torch.tensor([[end, 0.0]], dtype=torch.float64)
        losses = torch.stack([outcome.loss(row[None], seen) for row in outputs])
        assert torch.exp(-losses).numpy() == pytest.approx(predictions[:, column].numpy(), rel=1e-6)
    assert predictions[:, -1].numpy() == pytest.approx(-predictions[:, :-1].log().sum(dim=1).numpy())
    start = outcome.predict(torch.zeros(1, outcome.outputs))
    assert start[0, -2].item() == pytest.approx(math.exp(-1))


@pytest.mark.parametrize("of_censoring", [False, True])
def test_share_without_event_equals_that_of_lifelines(of_censoring: bool) -> None:
    times, events, _ = draw_subjects()
    if of_censoring:
        # lifelines has the ends of observations before events at the same time.
        times = times + torch.where(events > 0, 0.0, 0.5)
    expected = KaplanMeierFitter().fit(times, 1 - events if of_censoring else events).predict(ENDS.numpy())
    found = estimate_survival(times, events, ENDS.double(), of_censoring=of_censoring)
    assert found.numpy() == pytest.approx(expected.to_numpy(), rel=1e-12)


def test_brier_scores_equal_those_of_scikit_survival() -> None:
    """sksurv.metrics.brier_score(y, y, survival, ENDS) and integrated_brier_score of 0.28.0."""
    times, events, survival = draw_subjects()
    scores = compute_brier_scores(survival, times, events, ENDS)
    expected = [0.13628378590815587, 0.24352385164673623, 0.34047136143899526, 0.27685747793878646]
    assert scores.tolist() == pytest.approx(expected, rel=1e-12)
    assert integrate(scores, ENDS) == pytest.approx(0.2734186650790213, rel=1e-12)
    assert integrate(scores[:1], ENDS[:1]) == pytest.approx(expected[0])


def test_metrics_leave_out_times_at_which_no_subject_is_seen() -> None:
    times, events, survival = draw_subjects()
    outcome = SurvivalOutcome("months", "died", "discrete", [*ENDS.tolist(), 30])
    risk = survival.sum(dim=1, keepdim=True)
    predictions = torch.cat([survival, survival[:, -1:], risk], dim=1)
    metrics = outcome.metrics(predictions, torch.stack([times, events], dim=1))
    calibrations = [f"calibration_{end}" for end in (3, 6, 10, 15)]
    assert list(metrics) == ["event_rate", "c_index", "ibs", *calibrations]
    assert metrics["ibs"] == pytest.approx(0.2734186650790213, rel=1e-6)
    assert metrics["c_index"] == compute_c_index(risk[:, 0], times, events)
    observed = KaplanMeierFitter().fit(times, events).predict(3)
    assert metrics["calibration_3"] == pytest.approx((1 - survival[:, 0].mean().item()) - (1 - observed))
    early = outcome.metrics(predictions[:1], torch.tensor([[2.0, 1.0]]))
    assert early == {"event_rate": 1.0}
