"""Models are compared with the last accepted one, in lengths of the site's own delta."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flare_sparse.core.errors import RequestRefused
from flare_sparse.core.exchange import Content, Patch, RequestId, Update
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.rounds.endpoints.request_log import ChangeLimit

LAYOUT = Layout.from_module(nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))
FULL = Mask.full(LAYOUT.size)
START = torch.zeros(LAYOUT.size)
STEP = torch.eye(LAYOUT.size)[0]


def build_limit(content: Content = "weights") -> ChangeLimit:
    """Return a limit of three lengths of a delta of length 2, after round 1."""
    limit = ChangeLimit(3.0, LAYOUT)
    limit.admit(RequestId("train", 1), START + 1, FULL)
    values = START + 1 + 2 * STEP if content == "weights" else 2 * STEP
    limit.measure(Update(Patch.from_vector(values, FULL), content, 1), START + 1)
    return limit


@pytest.mark.parametrize("content", ["weights", "delta"])
def test_distance_is_limited_and_a_refused_model_is_not_the_next_to_compare_with(content: Content) -> None:
    limit = build_limit(content)
    for _ in range(2):
        with pytest.raises(RequestRefused, match=r"the model is 6\.1 from the last one.*max_model_change 3 .* 6 here"):
            limit.admit(RequestId("train", 2), START + 1 + 6.1 * STEP, FULL)
    limit.admit(RequestId("train", 2), START + 1 + 6 * STEP, FULL)
    limit.admit(RequestId("evaluate", 3), START + 1 + 12 * STEP, FULL)


def test_rounds_without_the_site_add_up() -> None:
    build_limit().admit(RequestId("train", 4), START + 1 + 18 * STEP, FULL)
    with pytest.raises(RequestRefused):
        build_limit().admit(RequestId("train", 3), START + 1 + 18 * STEP, FULL)


def test_pruned_entries_and_running_statistics_do_not_count() -> None:
    limit, size = build_limit(), LAYOUT.size
    live = Mask(torch.arange(size) > 0)
    limit.admit(RequestId("train", 2), torch.where(live.bits, 1.0, 0.0) - 100 * STEP, live)
    buffers = Mask.from_tensors(LAYOUT, lambda spec: spec.role == "buffer")
    assert buffers.count
    limit.admit(RequestId("train", 3), torch.where(buffers.bits, 1e6, 1.0), live)


def test_first_model_and_models_before_the_first_delta_are_not_limited() -> None:
    limit = ChangeLimit(1.0, LAYOUT)
    limit.admit(RequestId("score", 0), START, FULL)
    limit.admit(RequestId("train", 1), START + 100, FULL)


def test_evaluation_of_no_entries_does_not_reset_the_distance() -> None:
    """An empty model is near to every other one, and evaluation comes after the last round of many."""
    limit = build_limit()
    limit.admit(RequestId("evaluate", 101), START, Mask.empty(LAYOUT.size))
    with pytest.raises(RequestRefused, match="6 here"):
        limit.admit(RequestId("train", 2), START + 1 + 6.1 * STEP, FULL)
    limit.admit(RequestId("train", 2), START + 1 + 6 * STEP, FULL)


def test_each_entry_is_measured_from_the_last_value_seen_at_it() -> None:
    first, limit = Mask(STEP > 0), ChangeLimit(3.0, LAYOUT)
    limit.admit(RequestId("train", 1), START + STEP, first)
    limit.measure(Update(Patch.from_vector(START + 3 * STEP, FULL), "weights", 1), START + STEP)
    # Never seen: from 0. Those of the first entry are as they were.
    second = torch.eye(LAYOUT.size)[1]
    with pytest.raises(RequestRefused, match=r"6\.1 from"):
        limit.admit(RequestId("train", 2), STEP + 6.1 * second, FULL)
    limit.admit(RequestId("train", 2), 5 * second, FULL - first)
    with pytest.raises(RequestRefused, match="10 from"):
        limit.admit(RequestId("train", 3), 11 * STEP + 5 * second, FULL)
