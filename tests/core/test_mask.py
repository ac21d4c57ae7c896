"""Exact selections with deterministic ties, and layouts."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flare_sparse.core.errors import SelectionError
from flare_sparse.core.mask import (
    Mask,
    ceil_fraction,
    floor_fraction,
    top_k,
    top_k_per_tensor,
)
from flare_sparse.core.params import Layout, TensorSpec

SCORES = st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.0, 1.0, 2.0, float("inf")]), min_size=1, max_size=60)


@pytest.mark.slow
@given(SCORES, st.data())
def test_top_k_selects_exactly_k_largest_scores_with_ties_to_the_lowest_index(
    values: list[float], data: st.DataObject
) -> None:
    """docs/algorithms.md, section 1.4; the result never lies outside the candidates."""
    scores = torch.tensor(values)
    within = Mask(torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))))
    k = data.draw(st.integers(0, within.count))
    order = [i for i in np.argsort(-scores.numpy(), kind="stable") if within.bits[i]][:k]
    assert np.flatnonzero(top_k(scores, k, within).bits.numpy()).tolist() == sorted(order)


@pytest.mark.parametrize("k", [-1, 4])
def test_selecting_more_entries_than_there_are_raises(k: int) -> None:
    with pytest.raises(SelectionError, match="of 3 entries"):
        top_k(torch.ones(3), k)


def test_top_k_of_nan_scores_raises() -> None:
    with pytest.raises(SelectionError, match="1 of 3 scores are NaN"):
        top_k(torch.tensor([1.0, float("nan"), 2.0]), 1)


def test_top_k_per_tensor_keeps_the_best_of_every_tensor() -> None:
    layout = Layout((TensorSpec("a", (3,), "weight"), TensorSpec("b", (3,), "weight")))
    scores = torch.tensor([9.0, 8, 7, 1, 3, 2])
    assert top_k_per_tensor(scores, 3, layout, Mask.full(6), 1).bits.tolist() == [True, True, False, False, True, False]
    apart = [Mask(torch.arange(6) >= 4)]
    # A third of the entries stands apart, and gets a third of what is selected; rounding favours the others.
    assert top_k_per_tensor(scores, 3, layout, Mask.full(6), 0, apart).bits.tolist() == [
        True,
        True,
        *[False] * 2,
        True,
        False,
    ]
    assert top_k_per_tensor(scores, 2, layout, Mask.full(6), 0, apart).count == 2
    assert top_k_per_tensor(scores, 3, layout, Mask.full(6), 0).bits.tolist() == [True] * 3 + [False] * 3
    with pytest.raises(SelectionError, match="min_per_layer"):
        top_k_per_tensor(scores, 1, layout, Mask.full(6), 1)


@pytest.mark.parametrize(("fraction", "total", "count"), [(0.1, 30, 3), (0.29, 100, 29), (0.95, 7, 6), (0, 9, 0)])
def test_floor_fraction_tolerates_rounding_of_decimals(fraction: float, total: int, count: int) -> None:
    assert floor_fraction(fraction, total) == count


@pytest.mark.parametrize("total", [7, 1000, 2**22 + 1, 10**8, 10**9, 2**31 + 11])
def test_share_of_a_decimal_is_exact_for_every_total(total: int) -> None:
    """A tolerance of 1e-9 on the product misses 0.29 of 10**8; one that is larger selects an entry too many."""
    for thousandths in range(1001):
        share, exact = thousandths / 1000, Fraction(thousandths, 1000) * total
        assert floor_fraction(share, total) == floor_fraction(1 - (1 - share), total) == math.floor(exact)
        assert ceil_fraction(share, total) == math.ceil(exact)
    assert floor_fraction(1e-7, 10**7 - 1) == 0


def test_share_of_a_computed_fraction_reaches_the_integer_that_it_was_computed_from() -> None:
    for total in (3, 7, 49, 10_752, 2_950_401):
        for count in range(0, total + 1, max(total // 97, 1)):
            assert floor_fraction(count / total, total) == ceil_fraction(count / total, total) == count


def test_mask_keeps_zero_weights_live() -> None:
    """docs/algorithms.md, section 1.3: masks are explicit, never derived from values."""
    mask = Mask(torch.tensor([True, False, True]))
    assert mask.take(torch.zeros(3)).tolist() == [0, 0]
    assert mask.put(torch.tensor([0.0, 5.0]), torch.ones(3)).tolist() == [0, 1, 5]
    assert (mask | ~mask).is_full
    assert (mask & mask, mask - mask) == (mask, Mask.empty(3))
    assert mask.fingerprint == Mask(mask.bits.clone()).fingerprint != (~mask).fingerprint
    with pytest.raises(SelectionError, match="bool"):
        Mask(torch.zeros(3))


@pytest.mark.parametrize("mask", [Mask.full(3), Mask(torch.tensor([True, False, True]))])
@pytest.mark.parametrize("count", [1, 4])
def test_put_requires_as_many_values_as_selected_positions(mask: Mask, count: int) -> None:
    with pytest.raises(SelectionError, match="expected shape"):
        mask.put(torch.ones(count), torch.zeros(3))


def test_layout_lists_parameters_then_float_buffers() -> None:
    """docs/algorithms.md, sections 1.2 and 1.9: roles come from modules; integer buffers are not part of a layout."""
    net = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(4, 1))
    layout = Layout.from_module(net)
    assert [(e.name, e.role) for e in layout.tensors] == [
        ("0.weight", "weight"), ("0.bias", "bias"), ("1.weight", "norm"), ("1.bias", "norm"),
        ("3.weight", "weight"), ("3.bias", "bias"), ("1.running_mean", "buffer"), ("1.running_var", "buffer"),
    ]  # fmt: skip
    assert (layout.size, layout.num_parameters) == (69, 65)
    named = dict([*net.named_parameters(), *net.named_buffers()])
    vector = layout.flatten(named)
    assert all(torch.equal(tensor, named[name]) for name, tensor in layout.unflatten(vector).items())
    presets = ("conv_linear_weights", "all_but_norm", "all_trainable")
    assert [Mask.from_preset(layout, preset).count for preset in presets] == [58, 61, 65]
    assert layout.fingerprint != Layout(layout.tensors[::-1]).fingerprint
