"""Robust aggregation: equal to numpy, over the owners of an entry, and not moved far by a hostile site."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.core.exchange import Content, Contribution, Patch
from flare_sparse.core.mask import Mask
from flare_sparse.methods.aggregation.server_step import AggregationRule, aggregate, clip_deltas
from flare_sparse.methods.aggregation.weighted import weigh_by_examples, weighted_sum

MEDIAN, TRIMMED = AggregationRule(rule="median"), AggregationRule(rule="trimmed_mean", trim=0.25)


def update(i: int, values: torch.Tensor, mask: Mask | None = None, content: Content = "weights") -> Contribution:
    return Contribution(f"site-{i}", Patch.from_vector(values, mask or Mask.full(values.numel())), content, 10 + i)


def dense(sites: int, size: int = 50, seed: int = 0) -> list[Contribution]:
    draw = torch.Generator().manual_seed(seed)
    return [update(i, torch.randn(size, generator=draw)) for i in range(sites)]


def rows(contributions: list[Contribution]) -> np.ndarray:
    return np.stack([u.patch.values.double().numpy() for u in contributions])


def test_mean_equals_the_weighted_sum_bit_for_bit() -> None:
    updates = dense(5)
    assert torch.equal(aggregate(updates, torch.zeros(50), AggregationRule()), weighted_sum(updates, weigh_by_examples))


@pytest.mark.parametrize("sites", [3, 4, 5, 8])
def test_median_equals_numpys(sites: int) -> None:
    updates = dense(sites)
    expected = np.median(rows(updates), axis=0).astype(np.float32)
    assert np.array_equal(aggregate(updates, torch.zeros(50), MEDIAN).numpy(), expected)


@pytest.mark.parametrize("sites", [4, 8, 9])
def test_trimmed_mean_leaves_out_the_same_number_at_each_end(sites: int) -> None:
    updates = dense(sites)
    inner = np.sort(rows(updates), axis=0)[sites // 4 : sites - sites // 4]
    assert np.allclose(aggregate(updates, torch.zeros(50), TRIMMED).numpy(), inner.mean(0), atol=1e-7)


def test_trimmed_mean_leaves_out_the_exact_share() -> None:
    """0.29 of 100 sites are 29; the float32 product is 28.999998."""
    updates, rule = dense(100, size=3), AggregationRule(rule="trimmed_mean", trim=0.29)
    inner = np.sort(rows(updates), axis=0)[29:71]
    assert np.allclose(aggregate(updates, torch.zeros(3), rule).numpy(), inner.mean(0), rtol=0, atol=1e-7)


def test_only_owners_of_an_entry_count_and_too_few_owners_keep_it() -> None:
    bits = ([1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 0, 0])
    masks = [Mask(torch.tensor(row, dtype=torch.bool)) for row in bits]
    updates = [update(i, torch.full((4,), float(i + 1)), mask) for i, mask in enumerate(masks)]
    before = torch.tensor([9.0, 9.0, 9.0, 9.0])
    assert aggregate(updates, before, MEDIAN).tolist() == [2.5, 2.0, 9.0, 9.0]


def test_entries_outside_a_common_mask_become_zero() -> None:
    mask = Mask(torch.tensor([True, False, True]))
    updates = [update(i, torch.full((3,), float(i)), mask) for i in range(3)]
    assert aggregate(updates, torch.tensor([5.0, 0.0, 5.0]), MEDIAN).tolist() == [1.0, 0.0, 1.0]


@given(
    honest=st.lists(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4), min_size=5, max_size=9),
    hostile=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4),
    rule=st.sampled_from([MEDIAN, TRIMMED]),
)
def test_one_hostile_site_moves_no_entry_out_of_the_honest_range(
    honest: list[list[float]], hostile: list[float], rule: AggregationRule
) -> None:
    everyone = [update(i, torch.tensor(row)) for i, row in enumerate([*honest, hostile])]
    result = aggregate(everyone, torch.zeros(4), rule)
    matrix = torch.tensor(honest)
    assert bool((result >= matrix.min(0).values - 1e-5).all())
    assert bool((result <= matrix.max(0).values + 1e-5).all())


@given(order=st.permutations(range(6)))
def test_order_of_arrival_does_not_change_a_bit_of_a_robust_aggregate(order: list[int]) -> None:
    updates = dense(6)
    shuffled = [updates[i] for i in order]
    for rule in (MEDIAN, TRIMMED):
        assert torch.equal(aggregate(shuffled, torch.zeros(50), rule), aggregate(updates, torch.zeros(50), rule))


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


@pytest.mark.parametrize(
    ("rule", "sites"),
    [(AggregationRule(), 1), (MEDIAN, 3), (TRIMMED, 4), (AggregationRule(rule="trimmed_mean"), 10)],
)
def test_rule_needs_enough_sites_to_outvote_one(rule: AggregationRule, sites: int) -> None:
    assert rule.min_sites_needed == sites
