"""Survival: loss and C-index written out, and the share without an event as lifelines has it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lifelines import KaplanMeierFitter

from flare_sparse.core.ranking import estimate_survival
from flare_sparse.tasks.outcomes import compute_c_index, compute_cox_loss

# lifelines' own use of pandas.
pytestmark = pytest.mark.filterwarnings("ignore:Starting with pandas version 4.0")


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


def test_share_without_event_equals_that_of_lifelines() -> None:
    draw = np.random.default_rng(7)
    times = torch.as_tensor(np.ceil(draw.exponential(10, 40)).clip(1, 30))
    events, ends = torch.as_tensor(draw.random(40) < 0.6).double(), torch.tensor([3.0, 6, 10, 15]).double()
    expected = KaplanMeierFitter().fit(times, events).predict(ends.numpy())
    assert estimate_survival(times, events, ends).numpy() == pytest.approx(expected.to_numpy(), rel=1e-12)
