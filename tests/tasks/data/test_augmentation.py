"""Augmentation: exact changes, drawn from the generator alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flare_sparse.tasks.data.augmentation import Augmentation, _shift


def apply(inputs: torch.Tensor, seed: int = 0, **settings: Any) -> torch.Tensor:
    augmentation = Augmentation.model_validate(settings)
    return augmentation.apply(inputs, torch.Generator().manual_seed(seed), mirrored_axis=0)[0]


@pytest.fixture
def volumes() -> torch.Tensor:
    return torch.randn(16, 1, 4, 5, 6, generator=torch.Generator().manual_seed(1))


def test_nothing_changes_by_default(volumes: torch.Tensor) -> None:
    assert apply(volumes) is volumes


def test_some_volumes_are_mirrored_along_the_first_axis_and_the_others_stay(volumes: torch.Tensor) -> None:
    changed, mirror = apply(volumes, mirror=True), volumes.flip(2)
    is_mirrored = [torch.equal(a, b) for a, b in zip(changed, mirror, strict=True)]
    assert 0 < sum(is_mirrored) < len(volumes)
    assert all(flag or torch.equal(a, b) for flag, a, b in zip(is_mirrored, changed, volumes, strict=True))


def test_shift_repeats_the_border() -> None:
    example = torch.arange(4.0).view(1, 4)
    assert _shift(example, [1]).tolist() == [[0, 0, 1, 2]]
    assert _shift(example, [-2]).tolist() == [[2, 3, 3, 3]]
    # At most all but one value are moved out.
    assert _shift(example, [9]).tolist() == [[0, 0, 0, 0]]
    assert example.tolist() == [[0, 1, 2, 3]]


def test_shifts_are_of_up_to_the_given_size_in_both_directions_on_every_axis() -> None:
    points = torch.zeros(64, 1, 7, 7, 7)
    points[:, :, 3, 3, 3] = 1
    moved = apply(points, shift=2).nonzero()[:, 2:] - 3
    assert [sorted(set(column.tolist())) for column in moved.T] == [[-2, -1, 0, 1, 2]] * 3


def test_intensity_scales_and_shifts_within_its_bound(volumes: torch.Tensor) -> None:
    changed = apply(torch.ones_like(volumes), intensity=0.05)
    assert len(changed.unique()) == len(volumes)
    assert 0.05 < (changed - 1).abs().max() <= 0.1 + 1e-6


def test_draws_of_one_change_do_not_depend_on_the_others(volumes: torch.Tensor) -> None:
    both = apply(volumes, mirror=True, shift=1)
    assert torch.equal(both, apply(apply(volumes, mirror=True), shift=1))


def test_changes_depend_on_the_generator_alone(volumes: torch.Tensor) -> None:
    settings = {"mirror": True, "shift": 1, "intensity": 0.1}
    torch.manual_seed(5)
    first = apply(volumes, **settings)
    torch.manual_seed(6)
    assert torch.equal(first, apply(volumes, **settings))
    assert not torch.equal(first, apply(volumes, seed=1, **settings))


def test_labels_are_moved_with_their_volume_and_keep_their_values(volumes: torch.Tensor) -> None:
    augmentation = Augmentation(mirror=True, shift=2, intensity=0.1)
    labels = (volumes[:, 0] > 0).to(torch.uint8)
    changed, moved = augmentation.apply(volumes, torch.Generator().manual_seed(3), mirrored_axis=0, labels=labels)
    alone, _ = augmentation.apply(volumes, torch.Generator().manual_seed(3), mirrored_axis=0)
    assert torch.equal(changed, alone)
    only_moved = Augmentation(mirror=True, shift=2)
    positions, _ = only_moved.apply(volumes, torch.Generator().manual_seed(3), mirrored_axis=0)
    assert torch.equal(moved, (positions[:, 0] > 0).to(torch.uint8))
