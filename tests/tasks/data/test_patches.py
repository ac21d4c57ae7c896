"""Patches: around a class, filled up like MONAI's sliding window, and the same number of draws for each."""

from __future__ import annotations

import pytest
import torch

from flare_sparse.tasks.data.segmentation import cut_patch, sample_patch, take_central_patch


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def volume() -> tuple[torch.Tensor, torch.Tensor]:
    """A volume whose voxels count up, with one voxel of class 2 near a corner and a block of class 1."""
    labels = torch.zeros(10, 12, 9, dtype=torch.uint8)
    labels[0, 11, 8] = 2
    labels[4:7, 4:7, 4:7] = 1
    return torch.arange(10 * 12 * 9.0).view(1, 10, 12, 9), labels


def test_patches_of_image_and_labels_are_of_the_same_place(volume: tuple[torch.Tensor, torch.Tensor]) -> None:
    image, labels = volume
    flat = labels.flatten()
    generator = make_generator()
    for _ in range(20):
        part, part_labels = sample_patch(image, labels, (4, 5, 6), 0.5, generator)
        assert part.shape == (1, 4, 5, 6)
        assert torch.equal(part_labels, flat[part[0].long()])


def test_each_class_is_as_likely_as_any_other_however_small(volume: tuple[torch.Tensor, torch.Tensor]) -> None:
    generator = make_generator()
    patches = [sample_patch(*volume, (3, 3, 3), 1.0, generator)[1] for _ in range(200)]
    with_small = sum(bool((labels == 2).any()) for labels in patches)
    assert all(bool(labels.any()) for labels in patches)
    assert 80 < with_small < 120


def test_positions_without_a_class_are_uniform(volume: tuple[torch.Tensor, torch.Tensor]) -> None:
    generator = make_generator()
    firsts = [int(sample_patch(*volume, (10, 12, 7), 0.0, generator)[0].min()) for _ in range(300)]
    assert set(firsts) == {0, 1, 2}
    assert min(firsts.count(start) for start in range(3)) > 70


def test_every_patch_takes_the_same_number_of_draws(volume: tuple[torch.Tensor, torch.Tensor]) -> None:
    image, labels = volume
    states = []
    for share, marks in ((0.0, labels), (1.0, labels), (1.0, torch.zeros_like(labels))):
        generator = make_generator()
        sample_patch(image, marks, (4, 4, 4), share, generator)
        states.append(generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_small_volume_is_filled_with_zeros_on_both_sides() -> None:
    volume = torch.ones(1, 2, 4, 3)
    patch = cut_patch(volume, (0, 1, 0), (5, 2, 4))
    assert patch.shape == (1, 5, 2, 4)
    assert patch[0, :, 0, 0].tolist() == [0, 1, 1, 0, 0]
    assert patch[0, 1, 0].tolist() == [1, 1, 1, 0]


def test_central_patch_is_in_the_middle_of_the_labels(volume: tuple[torch.Tensor, torch.Tensor]) -> None:
    image, labels = volume
    labels = torch.where(labels == 2, 0, labels)
    part, part_labels = take_central_patch(image, labels, (3, 3, 3))
    assert part_labels.eq(1).all()
    assert part[0, 0, 0, 0] == image[0, 4, 4, 4]
    part, _ = take_central_patch(image, torch.zeros_like(labels), (2, 2, 9))
    assert part[0, 0, 0, 0] == image[0, 4, 5, 0]
