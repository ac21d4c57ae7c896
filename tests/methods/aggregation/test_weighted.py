"""Weighted sums: exact values, and the same bits in any order of arrival."""

from __future__ import annotations

import pytest
import torch

from flare_sparse.core.exchange import Content, Contribution, Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import compute_digest
from flare_sparse.methods.aggregation.weighted import (
    average_over_owners,
    clip_deltas,
    weigh_by_examples,
    weigh_equally,
    weighted_sum,
)


def build_contributions() -> list[Contribution]:
    masks = [Mask(torch.tensor(bits, dtype=torch.bool)) for bits in ([1, 1, 0], [0, 1, 0])]
    return [
        Contribution("a", Patch(torch.tensor([1.0, 2.0]), masks[0]), "weights", 1),
        Contribution("b", Patch(torch.tensor([6.0]), masks[1]), "weights", 3),
    ]


def test_sum_counts_absent_entries_as_zero_and_average_over_owners_leaves_them_out() -> None:
    assert weighted_sum(build_contributions(), weigh_by_examples).tolist() == [0.25, 5.0, 0.0]
    assert weighted_sum(build_contributions(), weigh_equally).tolist() == [0.5, 4.0, 0.0]
    assert average_over_owners(build_contributions(), weigh_by_examples, torch.full((3,), 9.0)).tolist() == [
        1.0,
        5.0,
        9.0,
    ]


def test_order_of_arrival_does_not_change_a_bit_of_a_sum() -> None:
    draw = torch.Generator().manual_seed(1)
    mask = Mask.full(1000)
    parts = [Contribution(f"s{n}", Patch(torch.randn(1000, generator=draw), mask), "weights", n) for n in range(1, 9)]
    digests = {
        compute_digest(weighted_sum([parts[i] for i in torch.randperm(8).tolist()], weigh_by_examples))
        for _ in range(50)
    }
    assert len(digests) == 1


def test_sum_needs_exactly_one_update_per_site() -> None:
    with pytest.raises(ValueError, match="one update of each site"):
        weighted_sum([], weigh_equally)
    with pytest.raises(ValueError, match="one update of each site"):
        weighted_sum([build_contributions()[0], build_contributions()[0]], weigh_equally)


def test_mean_of_equal_updates_is_the_update() -> None:
    values = torch.randn(50)
    parts = [Contribution(f"s{n}", Patch(values, Mask.full(50)), "weights", n) for n in (1, 5, 7)]
    assert torch.allclose(weighted_sum(parts, weigh_by_examples), values)


def update(i: int, values: torch.Tensor, content: Content = "weights") -> Contribution:
    return Contribution(f"site-{i}", Patch.from_vector(values, Mask.full(values.numel())), content, 10 + i)


def test_long_delta_is_clipped_and_its_norm_returned() -> None:
    before = torch.ones(4)
    near, far = update(0, before + 0.1), update(1, before + 100.0)
    clipped, norms = clip_deltas([near, far], before, 2.0)
    assert clipped[0] is near
    assert norms == {"site-1": pytest.approx(200.0)}
    assert float((clipped[1].patch.values - before).norm()) == pytest.approx(2.0, rel=1e-6)
    assert clip_deltas([near, far], before, None) == ([near, far], {})


def test_scores_are_not_clipped_and_deltas_are_measured_from_zero() -> None:
    scores, delta = (
        update(0, torch.full((4,), 50.0), content="scores"),
        update(1, torch.full((4,), 50.0), content="delta"),
    )
    clipped, norms = clip_deltas([scores, delta], torch.full((4,), 49.0), 1.0)
    assert clipped[0] is scores
    assert list(norms) == ["site-1"]
