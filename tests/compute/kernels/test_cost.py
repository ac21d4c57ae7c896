"""The model that decides between dense and sparse computation."""

from __future__ import annotations

import pytest

from flare_sparse.compute.kernels.cost import Work, is_sparse_faster
from flare_sparse.compute.kernels.geometry import Geometry, Triple


def build_geometry(inputs: int, outputs: int, shape: Triple) -> Geometry:
    return Geometry(inputs, outputs, shape, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))


@pytest.mark.parametrize(
    ("is_training", "expected"), [(False, [True, True, True, False]), (True, [True, True, False, False])]
)
def test_sparse_is_faster_for_few_live_weights_of_a_large_layer(is_training: bool, expected: list[bool]) -> None:
    geometry = build_geometry(32, 64, (45, 54, 45))
    weights = 32 * 64 * 27
    works = [
        Work(geometry, int(weights * density), 1, is_normalised=True, is_pooled=True, is_training=is_training)
        for density in (0.01, 0.1, 0.5, 1.0)
    ]
    assert [is_sparse_faster(work) for work in works] == expected


def test_first_layer_of_a_full_volume_is_fused_whatever_its_mask() -> None:
    """Normalisation and pooling of 29 million values take longer than the convolution."""
    geometry = build_geometry(1, 32, (91, 109, 91))
    assert is_sparse_faster(Work(geometry, 32 * 27, 1, is_normalised=True, is_pooled=True, is_training=True))


def test_small_layer_stays_dense_whatever_its_sparsity() -> None:
    assert not is_sparse_faster(Work(build_geometry(1, 4, (6, 6, 6)), 1, 1))


@pytest.mark.parametrize(("threads", "expected"), [(1, [True, True]), (2, [True, False]), (8, [True, False])])
def test_with_threads_a_layer_near_the_break_even_stays_dense(threads: int, expected: list[bool]) -> None:
    """Half of the second layer's weights are live: the kernels are expected to take 1.03 to 1.07 times less."""
    large, half = build_geometry(32, 64, (45, 54, 45)), build_geometry(16, 32, (26, 32, 26))
    works = [
        Work(large, 5530, 1, is_normalised=True, is_pooled=True, is_training=True, threads=threads),
        Work(half, 16 * 32 * 27 // 2, 8, is_normalised=True, is_pooled=True, is_training=True, threads=threads),
    ]
    assert [is_sparse_faster(work) for work in works] == expected


def test_decision_changes_once_from_sparse_to_dense_as_weights_are_added() -> None:
    geometry = build_geometry(64, 128, (11, 13, 11))
    decisions = [is_sparse_faster(Work(geometry, live, 4)) for live in range(0, 64 * 128 * 27, 1000)]
    assert decisions == sorted(decisions, reverse=True)
    assert decisions[0]
    assert not decisions[-1]
