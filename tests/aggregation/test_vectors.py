"""Vectors of zeros: memory is recycled once nothing references it, and never before."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flare_sparse.aggregation.vectors import MIN_RECYCLED_ENTRIES, VectorPool

SIZES = (MIN_RECYCLED_ENTRIES, MIN_RECYCLED_ENTRIES + 1, 10)


def test_memory_of_the_vector_before_the_last_is_recycled() -> None:
    pool = VectorPool()
    first, second = pool.take_zeros(MIN_RECYCLED_ENTRIES), pool.take_zeros(MIN_RECYCLED_ENTRIES)
    address = first.data_ptr()
    first.fill_(7.0)
    del first
    third = pool.take_zeros(MIN_RECYCLED_ENTRIES)
    assert (third.data_ptr(), int(third.count_nonzero())) == (address, 0)
    assert second.data_ptr() != address


def test_view_of_a_vector_keeps_its_memory() -> None:
    pool = VectorPool()
    vector = pool.take_zeros(MIN_RECYCLED_ENTRIES)
    views = [vector[5:9], vector.view(torch.int32), vector.numpy()[3:5]]
    address = vector.data_ptr()
    del vector
    while views:
        assert pool.take_zeros(MIN_RECYCLED_ENTRIES).data_ptr() != address
        views.pop()


def test_cleared_pool_leaves_vectors_as_they_are() -> None:
    pool = VectorPool()
    vector = pool.take_zeros(MIN_RECYCLED_ENTRIES).fill_(3.0)
    pool.clear()
    assert pool.take_zeros(MIN_RECYCLED_ENTRIES).count_nonzero() == 0
    assert bool((vector == 3.0).all())


@given(steps=st.lists(st.tuples(st.sampled_from(SIZES), st.integers(0, 3)), max_size=12))
def test_vectors_in_use_never_share_memory(steps: list[tuple[int, int]]) -> None:
    pool = VectorPool()
    in_use: dict[int, Tensor] = {}
    for number, (size, slot) in enumerate(steps, start=1):
        # The vector that the slot had goes first.
        in_use.pop(slot, None)
        vector = pool.take_zeros(size)
        assert vector.shape == (size,)
        assert int(vector.count_nonzero()) == 0
        in_use[slot] = vector.fill_(number)
        assert len({kept.data_ptr() for kept in in_use.values()}) == len(in_use)
        assert all(bool((kept == kept[0]).all()) for kept in in_use.values())
