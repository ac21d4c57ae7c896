"""Volumes: voxels are read exactly, and unusable files are refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from monai.transforms import Compose, EnsureChannelFirst, NormalizeIntensity
from thoroughness import count_cases
from torch import nn

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.brain import (
    build_preprocessing,
    normalize_brain,
    read_voxels,
)

SHAPE = (6, 8, 4)
VOXELS = np.random.default_rng(0).integers(0, 200, SHAPE).astype(np.uint8)


def nifti(file: Path, voxels: np.ndarray = VOXELS, affine: np.ndarray | None = None) -> Path:
    nib.save(nib.Nifti1Image(voxels, np.diag([3.0, 3.0, 3.0, 1.0]) if affine is None else affine), file)
    return file


def test_voxels_are_read_unchanged(tmp_path: Path) -> None:
    voxels = read_voxels(nifti(tmp_path / "a.nii.gz"), SHAPE)
    assert voxels.dtype == np.float32
    assert np.array_equal(voxels, VOXELS)


def test_other_orientations_are_reoriented_to_ras(tmp_path: Path) -> None:
    flipped = nifti(tmp_path / "a.nii.gz", VOXELS[::-1], np.diag([-3.0, 3.0, 3.0, 1.0]))
    assert np.array_equal(read_voxels(flipped, SHAPE), VOXELS)
    swapped = np.array([[0, 3.0, 0, 0], [3.0, 0, 0, 0], [0, 0, 3.0, 0], [0, 0, 0, 1]])
    turned = nifti(tmp_path / "b.nii.gz", VOXELS.swapaxes(0, 1), swapped)
    assert np.array_equal(read_voxels(turned, SHAPE), VOXELS)


def test_fourth_axis_of_length_one_is_dropped(tmp_path: Path) -> None:
    assert read_voxels(nifti(tmp_path / "a.nii.gz", VOXELS[..., None]), SHAPE).shape == SHAPE


def test_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing file a.nii.gz"):
        read_voxels(tmp_path / "a.nii.gz", SHAPE)


@pytest.mark.parametrize("kept", [0, 9, 100, 200])
def test_truncated_gzip_is_refused(tmp_path: Path, kept: int) -> None:
    file = nifti(tmp_path / "a.nii.gz")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"corrupt file a\.nii\.gz: .* Copy or convert it again"):
        read_voxels(file, SHAPE)


def test_file_that_is_not_an_image_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.nii.gz"
    file.write_bytes(gzip.compress(b"nothing of the kind" * 100))
    with pytest.raises(DataError, match=r"corrupt file a\.nii\.gz"):
        read_voxels(file, SHAPE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_voxels_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    voxels = VOXELS.astype(np.float32)
    voxels[0, :2, 0] = value
    with pytest.raises(DataError, match=r"2 voxels of a\.nii\.gz are NaN or infinite"):
        read_voxels(nifti(tmp_path / "a.nii.gz", voxels), SHAPE)


def test_wrong_shape_is_refused_before_and_after_reorientation(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"wrong shape 6x8x4 in a\.nii\.gz; expected 6x8x5"):
        read_voxels(nifti(tmp_path / "a.nii.gz"), (6, 8, 5))
    with pytest.raises(DataError, match=r"wrong shape 6x8x4 of a\.nii\.gz in RAS orientation; expected 8x6x4"):
        read_voxels(nifti(tmp_path / "a.nii.gz"), (8, 6, 4))


def test_constant_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all voxels of a\.nii\.gz are equal"):
        read_voxels(nifti(tmp_path / "a.nii.gz", np.full(SHAPE, 7, np.uint8)), SHAPE)


@pytest.mark.slow
@settings(max_examples=count_cases(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 351), value=st.integers(0, 255))
def test_changed_header_byte_raises_data_error_or_is_harmless(tmp_path: Path, place: int, value: int) -> None:
    file = nifti(tmp_path / "a.nii")
    content = bytearray(file.read_bytes())
    content[place] = value
    file.write_bytes(content)
    try:
        voxels = read_voxels(file, SHAPE)
    except DataError:
        return
    assert voxels.shape == SHAPE
    assert np.isfinite(voxels).all()


def test_preprocessing_averages_cubes_and_z_scores() -> None:
    prepared = build_preprocessing(2)(VOXELS[:5].astype(np.float32))
    cubes = VOXELS[:4].reshape(2, 2, 4, 2, 2, 2).mean(axis=(1, 3, 5))
    assert prepared.shape == (1, 2, 4, 2)
    assert prepared.dtype == torch.float32
    assert type(prepared) is torch.Tensor
    np.testing.assert_allclose(prepared[0], (cubes - cubes.mean()) / cubes.std(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("downsample", [1, 2])
def test_standardised_volume_equals_that_of_monai(downsample: int) -> None:
    voxels = np.random.default_rng(1).random((9, 8, 7), np.float32)
    steps = [EnsureChannelFirst(channel_dim="no_channel"), nn.AvgPool3d(downsample), NormalizeIntensity()]
    assert torch.equal(build_preprocessing(downsample)(voxels), Compose(steps)(voxels).as_tensor())


def test_brain_has_median_zero_and_robust_deviation_one_and_background_zero() -> None:
    volume = torch.tensor([0.0, 0.0, 10.0, 20.0, 30.0, 40.0, 1000.0]).view(1, 7, 1, 1)
    # Quartiles 20, 30 and 40: the robust standard deviation is 20 / 1.349, whatever the largest value is.
    expected = torch.tensor([0.0, 0.0, -20.0, -10.0, 0.0, 10.0, 970.0]) * 1.349 / 20
    torch.testing.assert_close(normalize_brain(volume).flatten(), expected)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [0.0, 5.0, 5.0], [0.0, 5.0, 5.0, 5.0, 5.0, 5.0, 9.0]])
def test_brain_without_spread_between_its_quartiles_stays_finite(values: list[float]) -> None:
    normalized = normalize_brain(torch.tensor(values))
    assert torch.isfinite(normalized).all()
    assert normalized[1] == 0


def test_normalization_inside_the_brain_follows_the_downsampling() -> None:
    voxels = np.zeros((4, 4, 4), np.float32)
    voxels[:2, :2, :2], voxels[2:, :2, :2] = 10, 30
    normalized = build_preprocessing(2, "brain")(voxels)
    assert normalized.dtype == torch.float32
    assert normalized.shape == (1, 2, 2, 2)
    assert normalized.flatten().tolist() == pytest.approx([-1.349, 0, 0, 0, 1.349, 0, 0, 0])


def test_normalization_before_the_downsampling_leaves_the_edge_of_the_brain_alone() -> None:
    voxels = np.zeros((4, 2, 2), np.float32)
    # Quartiles 10, 20 and 30; half of the first cube is background, which counts as the median.
    voxels[:2, 0], voxels[2:, 0], voxels[2:, 1] = 30, 10, 20
    normalized = build_preprocessing(2, "brain_first")(voxels)
    assert normalized.dtype == torch.float32
    assert normalized.flatten().tolist() == pytest.approx([5 * 1.349 / 20, -5 * 1.349 / 20])
    # After the downsampling, the two cubes are equally dark.
    assert build_preprocessing(2, "brain")(voxels).flatten().tolist() == [0.0, 0.0]
