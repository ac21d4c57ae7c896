"""Dice and HD95 of single cases: by hand, for empty classes, and equal to a slow computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_sparse.tasks.segmentation import measure_case


def block(*corners: tuple[slice, slice, slice]) -> torch.Tensor:
    """Return a map of 6x6x6 voxels with class 1, 2, ... in the given blocks."""
    labels = torch.zeros(6, 6, 6, dtype=torch.uint8)
    for number, corner in enumerate(corners, start=1):
        labels[corner] = number
    return labels


CUBE = (slice(0, 2), slice(0, 2), slice(0, 2))
SHIFTED = (slice(1, 3), slice(0, 2), slice(0, 2))


def test_dice_and_distance_of_a_shifted_cube() -> None:
    row = measure_case(block(SHIFTED), block(CUBE), 1, (3.0, 1.0, 1.0), hd95=True)
    assert row.tolist() == pytest.approx([0.5, 0.5, 3.0, 3.0])


def test_metrics_of_several_classes_follow_their_mean() -> None:
    far = (slice(4, 6), slice(4, 6), slice(4, 6))
    row = measure_case(block(SHIFTED, far), block(CUBE, far), 2, (1.0, 1.0, 1.0), hd95=True)
    assert row.tolist() == pytest.approx([0.75, 0.5, 1.0, 0.5, 1.0, 0.0])
    assert measure_case(block(CUBE), block(CUBE), 1, (1, 1, 1), hd95=False).tolist() == [1.0, 1.0]


def test_absent_class_is_perfect_if_it_is_not_predicted_and_the_diagonal_away_if_it_is() -> None:
    empty, cube, spacing = block(), block(CUBE), (1.0, 2.0, 2.0)
    assert measure_case(empty, empty, 1, spacing, hd95=True).tolist() == [1, 1, 0, 0]
    for predicted, labels in ((cube, empty), (empty, cube)):
        assert measure_case(predicted, labels, 1, spacing, hd95=True).tolist() == pytest.approx([0, 0, 18, 18])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_values_equal_those_of_a_slow_computation(seed: int) -> None:
    rng, spacing = np.random.default_rng(seed), (1.0, 2.0, 0.5)
    masks = [rng.random((5, 4, 6)) < 0.2 for _ in range(2)]
    for mask in masks:
        mask[2, 2, 2] = True
    predicted, labels = (torch.from_numpy(mask.astype(np.uint8)) for mask in masks)
    dice = 2 * (masks[0] & masks[1]).sum() / (masks[0].sum() + masks[1].sum())
    surfaces = [np.argwhere(mask & ~_erode(mask)) * spacing for mask in masks]
    distances = np.linalg.norm(surfaces[0][:, None] - surfaces[1][None], axis=2)
    hd95 = max(np.percentile(distances.min(axis), 95) for axis in (0, 1))
    row = measure_case(predicted, labels, 1, spacing, hd95=True)
    assert row.tolist() == pytest.approx([dice, dice, hd95, hd95], rel=1e-5)


def _erode(mask: np.ndarray) -> np.ndarray:
    """Return the voxels whose six neighbours are all in the mask."""
    padded = np.pad(mask, 1)
    return np.logical_and.reduce([np.roll(padded, s, a)[1:-1, 1:-1, 1:-1] for a in range(3) for s in (-1, 1)])
