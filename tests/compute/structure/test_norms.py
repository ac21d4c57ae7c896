"""Running variances below 0 become 0; every other value keeps its bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases
from torch import nn

from flare_sparse.compute.structure.nodes import clip_variances
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout

LAYOUT = Layout.from_module(
    nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
)
VARIANCES = LAYOUT.select(lambda spec: spec.name in ("1.running_var", "3.running_var"))
VALUES = st.lists(st.floats(width=32, allow_nan=False), min_size=LAYOUT.size, max_size=LAYOUT.size)
BITS = st.lists(st.booleans(), min_size=LAYOUT.size, max_size=LAYOUT.size)


@pytest.mark.slow
@given(VALUES, BITS | st.just([True] * LAYOUT.size))
@settings(max_examples=count_cases(200), deadline=None)
def test_only_variances_below_zero_change(values: list[float], bits: list[bool]) -> None:
    vector, mask = torch.tensor(values), Mask(torch.tensor(bits))
    before = mask.take(vector).clone()
    given_values = mask.take(vector)
    clipped = clip_variances(given_values, mask, LAYOUT)
    is_below = mask.take(VARIANCES) & (before < 0)
    assert torch.equal(clipped, before.where(~is_below, torch.zeros(())))
    assert torch.equal(given_values, before)
    assert (clipped is given_values) == (not is_below.any())


def test_network_without_running_variances_keeps_its_values() -> None:
    layout = Layout.from_module(nn.Linear(3, 2))
    values = -torch.ones(layout.size)
    assert clip_variances(values, Mask.full(layout.size), layout) is values
