"""Values in a ring: no sum wraps around, the error stays below its bound, and every order gives one result."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases

from flare_sparse.core.errors import RejectedMessage
from flare_sparse.privacy.secure_aggregation.rings import MAX_BOUND, MAX_SITES, Ring, RingFormat


@given(bits=st.sampled_from([32, 64]), bound=st.floats(2.0**-10, MAX_BOUND))
def test_scale_is_the_largest_power_of_two_without_overflow(bits: int, bound: float) -> None:
    scale = Ring(bits, bound).scale
    assert bound * scale <= 2.0 ** (bits - 2) < 2 * bound * scale
    assert np.log2(scale).is_integer()


@given(bound=st.floats(2.0**-10, MAX_BOUND), sites=st.integers(1, MAX_SITES))
def test_error_of_32_bits_is_at_most_2_to_the_minus_20_of_the_bound(bound: float, sites: int) -> None:
    assert Ring(32, bound).compute_error(sites) <= 2.0**-20 * bound


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", [-1, 1])
def test_sum_of_largest_values_does_not_wrap_around(bits: int, sign: int) -> None:
    """Every site sends the bound, and each of them rounds up."""
    ring, sites = Ring(bits, 3.0), MAX_SITES
    total = np.zeros(1, f"<u{bits // 8}")
    for _ in range(sites):
        total += ring.encode(np.array([sign * 3.0]), 1 / sites)
    assert abs(float(ring.decode(total)[0]) - sign * 3.0) <= ring.compute_error(sites)


@settings(max_examples=count_cases(60), deadline=None)
@given(
    values=st.lists(st.lists(st.floats(-64, 64, width=32), min_size=5, max_size=5), min_size=1, max_size=6),
    examples=st.lists(st.integers(1, 10_000), min_size=6, max_size=6),
    wide=st.integers(0, 5),
)
def test_sum_equals_weighted_mean_within_the_error(values: list[list[float]], examples: list[int], wide: int) -> None:
    form = RingFormat(np.arange(5) < wide, Ring(32, 64.0))
    vectors, counts = np.array(values), np.array(examples[: len(values)], float)
    weights = counts / counts.sum()
    total = np.zeros(form.section_bytes, np.uint8)
    for vector, weight in zip(vectors, weights, strict=True):
        form.add(total, form.encode(vector, float(weight)))
    error = np.where(form.is_wide, form.WIDE.compute_error(len(values)), form.narrow.compute_error(len(values)))
    assert (np.abs(form.decode(total) - weights @ vectors) <= error + 1e-13).all()


def test_every_order_of_additions_gives_the_same_bits() -> None:
    form = RingFormat(np.arange(7) < 3, Ring(32, 64.0))
    vectors = np.random.default_rng(1).uniform(-64, 64, (4, 7))
    totals = set()
    for order in permutations(vectors):
        total = np.zeros(form.section_bytes, np.uint8)
        for vector in order:
            form.add(total, form.encode(vector, 0.25))
        totals.add(total.tobytes())
    assert len(totals) == 1


def test_section_has_4_bytes_a_value_and_8_for_wide_ones() -> None:
    assert RingFormat(np.arange(10) < 0, Ring(32, 1.0)).section_bytes == 40
    assert RingFormat(np.arange(10) < 3, Ring(32, 1.0)).section_bytes == 52


@pytest.mark.parametrize(
    ("value", "code"), [(np.nan, "E_FINITE"), (np.inf, "E_FINITE"), (64.001, "E_RANGE"), (-65.0, "E_RANGE")]
)
def test_value_that_the_ring_cannot_hold_is_refused(value: float, code: str) -> None:
    with pytest.raises(RejectedMessage) as caught:
        Ring(32, 64.0).encode(np.array([0.5, value]), 0.1)
    assert caught.value.code == code


def test_known_integers() -> None:
    """2^24 per unit for a bound of 64: 0.5 and -0.25, of weight 1."""
    encoded = Ring(32, 64.0).encode(np.array([0.5, -0.25]), 1.0)
    assert encoded.tolist() == [2**23, 2**32 - 2**22]
