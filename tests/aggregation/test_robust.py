"""Robust sums: exact against numpy, over the owners of a coordinate, and out of reach of a few hostile sites."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.aggregation.robust import AggregationRule, aggregate, clip_deltas
from flare_sparse.aggregation.weighted import weigh_by_examples, weighted_sum
from flare_sparse.exchange import Contribution, Patch
from flare_sparse.mask import Mask

MEDIAN, TRIMMED = AggregationRule(rule="median"), AggregationRule(rule="trimmed_mean", trim=0.25)


def update(i: int, values: torch.Tensor, on: Mask | None = None, content: str = "weights") -> Contribution:
    return Contribution(f"site-{i}", Patch.from_vector(values, on or Mask.full(values.numel())), content, 10 + i)  # type: ignore[arg-type]


def dense(sites: int, size: int = 50, seed: int = 0) -> list[Contribution]:
    draw = torch.Generator().manual_seed(seed)
    return [update(i, torch.randn(size, generator=draw)) for i in range(sites)]


def rows(updates: list[Contribution]) -> np.ndarray:
    return np.stack([u.patch.values.double().numpy() for u in updates])


def test_the_mean_is_the_weighted_sum_bit_for_bit() -> None:
    updates = dense(5)
    assert torch.equal(aggregate(updates, torch.zeros(50), AggregationRule()), weighted_sum(updates, weigh_by_examples))


@pytest.mark.parametrize("sites", [3, 4, 5, 8])
def test_the_median_is_numpys(sites: int) -> None:
    updates = dense(sites)
    expected = np.median(rows(updates), axis=0).astype(np.float32)
    assert np.array_equal(aggregate(updates, torch.zeros(50), MEDIAN).numpy(), expected)


@pytest.mark.parametrize("sites", [4, 8, 9])
def test_the_trimmed_mean_leaves_out_as_many_at_each_end(sites: int) -> None:
    updates = dense(sites)
    inner = np.sort(rows(updates), axis=0)[sites // 4 : sites - sites // 4]
    assert np.allclose(aggregate(updates, torch.zeros(50), TRIMMED).numpy(), inner.mean(0), atol=1e-7)


def test_only_the_owners_of_a_coordinate_count_and_too_few_change_nothing() -> None:
    on = [Mask(torch.tensor(row, dtype=torch.bool)) for row in ([1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 0, 0])]
    updates = [update(i, torch.full((4,), float(i + 1)), mask) for i, mask in enumerate(on)]
    before = torch.tensor([9.0, 9.0, 9.0, 9.0])
    assert aggregate(updates, before, MEDIAN).tolist() == [2.5, 2.0, 9.0, 9.0]


def test_outside_a_shared_mask_stays_zero() -> None:
    on = Mask(torch.tensor([True, False, True]))
    updates = [update(i, torch.full((3,), float(i)), on) for i in range(3)]
    assert aggregate(updates, torch.tensor([5.0, 0.0, 5.0]), MEDIAN).tolist() == [1.0, 0.0, 1.0]


@given(
    honest=st.lists(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), min_size=5, max_size=9),
    hostile=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4),
    rule=st.sampled_from([MEDIAN, TRIMMED]),
)
def test_one_hostile_site_moves_no_coordinate_out_of_the_honest_range(
    honest: list[list[float]], hostile: list[float], rule: AggregationRule
) -> None:
    everyone = [update(i, torch.tensor(row)) for i, row in enumerate([*honest, hostile])]
    result = aggregate(everyone, torch.zeros(4), rule)
    matrix = torch.tensor(honest)
    assert bool((result >= matrix.min(0).values - 1e-5).all())
    assert bool((result <= matrix.max(0).values + 1e-5).all())


@given(order=st.permutations(range(6)))
def test_the_order_of_arrival_does_not_show(order: list[int]) -> None:
    updates = dense(6)
    shuffled = [updates[i] for i in order]
    for rule in (MEDIAN, TRIMMED):
        assert torch.equal(aggregate(shuffled, torch.zeros(50), rule), aggregate(updates, torch.zeros(50), rule))


def test_a_long_change_is_shortened_and_said() -> None:
    before = torch.ones(4)
    near, far = update(0, before + 0.1), update(1, before + 100.0)
    kept, cut = clip_deltas([near, far], before, 2.0)
    assert kept[0] is near
    assert cut == {"site-1": pytest.approx(200.0)}
    assert float((kept[1].patch.values - before).norm()) == pytest.approx(2.0, rel=1e-6)
    assert clip_deltas([near, far], before, None) == ([near, far], {})


def test_scores_are_not_clipped_and_differences_are_as_they_are() -> None:
    scores, change = (
        update(0, torch.full((4,), 50.0), content="scores"),
        update(1, torch.full((4,), 50.0), content="delta"),
    )
    kept, cut = clip_deltas([scores, change], torch.full((4,), 49.0), 1.0)
    assert kept[0] is scores
    assert list(cut) == ["site-1"]


@pytest.mark.parametrize(
    ("combine", "sites"),
    [(AggregationRule(), 1), (MEDIAN, 3), (TRIMMED, 4), (AggregationRule(rule="trimmed_mean"), 10)],
)
def test_a_rule_says_how_many_sites_it_needs(combine: AggregationRule, sites: int) -> None:
    assert combine.min_sites_needed == sites
