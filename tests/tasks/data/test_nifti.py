"""Damaged or inconsistent NIfTI files: detected before a voxel is used and before memory is allocated."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.brain import build_preprocessing, read_voxels
from flare_sparse.tasks.data.nifti import read_nifti

SHAPE = (24, 26, 22)
AFFINE = np.diag([3.0, 3.0, 3.0, 1.0])


def smooth(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Return an image that compresses to a few kilobytes, like a brain."""
    grid = np.meshgrid(*(np.linspace(-1, 1, side) for side in shape), indexing="ij")
    noise = np.random.default_rng(3).integers(0, 8, shape)
    return (200 * np.exp(-3 * sum(axis**2 for axis in grid)) + noise).astype(np.uint8)


def nifti(
    file: Path, voxels: np.ndarray | None = None, affine: np.ndarray = AFFINE, kind: Any = nib.Nifti1Image
) -> Path:
    nib.save(kind(smooth() if voxels is None else voxels, affine), file)
    return file


def set_header_field(file: Path, field: str, value: Any) -> Path:
    """Rewrite the file with another number in its header and a valid checksum."""
    data = bytearray(gzip.decompress(file.read_bytes()))
    header = nib.Nifti1Header(bytes(data[:348]), check=False)
    header[field] = value
    file.write_bytes(gzip.compress(header.binaryblock + bytes(data[348:])))
    return file


@pytest.mark.slow
def test_flipped_bit_is_detected_or_changes_no_voxel(tmp_path: Path) -> None:
    """Bits that change no voxel are harmless: the time in the gzip header and the padding of its last byte."""
    file = nifti(tmp_path / "sub-01_T1w.nii.gz")
    original, voxels = file.read_bytes(), read_voxels(file, SHAPE)
    assert 4_000 < len(original) < 16_000
    rng, detected, harmless = np.random.default_rng(1), 0, 0
    for position in rng.choice(8 * len(original), 400, replace=False).tolist():
        damaged = bytearray(original)
        damaged[position // 8] ^= 1 << position % 8
        file.write_bytes(damaged)
        try:
            assert np.array_equal(read_voxels(file, SHAPE), voxels), "damage was not detected"
            harmless += 1
        except DataError:
            detected += 1
    assert detected + harmless == 400
    assert harmless <= 4


def test_real_brain_is_read_completely_and_flipped_bit_is_detected(shared_data: Path, tmp_path: Path) -> None:
    real = next(iter(sorted(shared_data.glob("brain_t1/NSK/sub-*/anat/*_T1w.nii.gz"))))
    assert read_voxels(real, (52, 64, 52), (3, 3, 3)).max() == 255
    data = bytearray(real.read_bytes())
    data[len(data) // 2] ^= 16
    copy = tmp_path / "copy.nii.gz"
    copy.write_bytes(data)
    with pytest.raises(DataError, match="corrupt"):
        read_voxels(copy, (52, 64, 52))


def test_header_that_declares_terabytes_allocates_no_memory(tmp_path: Path) -> None:
    file = set_header_field(nifti(tmp_path / "a.nii.gz"), "dim", [3, 32767, 32767, 32767, 1, 1, 1, 1])
    tracemalloc.start()
    with pytest.raises(DataError, match="wrong shape 32767x32767x32767"):
        read_voxels(file, SHAPE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.slow
def test_decompression_bomb_stops_at_declared_length(tmp_path: Path) -> None:
    """300 MB of zeros in 300 KB."""
    file = nifti(tmp_path / "a.nii.gz")
    data = gzip.decompress(file.read_bytes())
    with gzip.open(file, "wb") as stream:
        stream.write(data)
        for _ in range(300):
            stream.write(bytes(2**20))
    assert file.stat().st_size < 2**20
    tracemalloc.start()
    with pytest.raises(DataError, match=r"inflates to more than the \d+ bytes"):
        read_voxels(file, SHAPE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


@pytest.mark.parametrize(
    ("affine", "message"),
    [
        (np.zeros((4, 4)), "does not map voxels to space"),
        (np.diag([3.0, 3.0, np.nan, 1.0]), "does not map voxels to space"),
        (np.diag([3.0, 3.0, 300.0, 1.0]), "voxels of 3x3x300 mm"),
        (np.diag([3.0, 3.0, 0.01, 1.0]), "voxels of 3x3x0.01 mm"),
        (np.diag([3.0, 3.0, 2.0, 1.0]), "expected 3x3x3 mm: resample"),
    ],
)
def test_unusable_affine_is_refused(affine: np.ndarray, message: str, tmp_path: Path) -> None:
    image = nib.Nifti1Image(smooth(), None)
    image.header.set_sform(affine, code=2)
    nib.save(image, tmp_path / "a.nii.gz")
    with pytest.raises(DataError, match=message):
        read_voxels(tmp_path / "a.nii.gz", SHAPE, (3, 3, 3))


def test_voxels_of_no_size_are_refused_where_they_decide_the_affine(tmp_path: Path) -> None:
    file = set_header_field(nifti(tmp_path / "a.nii.gz"), "pixdim", np.zeros(8))
    assert read_nifti(file, None).shape == SHAPE
    for field, value in (("sform_code", 0), ("qform_code", 1)):
        set_header_field(file, field, value)
    with pytest.raises(DataError, match="voxels of 0x0x0 mm in the header; correct pixdim"):
        read_nifti(file, None)


def test_image_without_orientation_is_read_as_it_is_stored_but_not_turned(tmp_path: Path) -> None:
    file = tmp_path / "a.nii.gz"
    nib.save(nib.Nifti1Image(smooth(), None), file)
    with pytest.raises(DataError, match="does not say which side is left"):
        read_nifti(file, None)
    assert np.array_equal(read_nifti(file, None, canonical=False).dataobj, smooth())


@pytest.mark.parametrize("dtype", [np.complex64, [("R", "u1"), ("G", "u1"), ("B", "u1")]])
def test_voxels_of_several_numbers_are_refused(dtype: Any, tmp_path: Path) -> None:
    voxels = np.zeros(SHAPE, dtype)
    with pytest.raises(DataError, match="expected one number per voxel"):
        read_voxels(nifti(tmp_path / "a.nii.gz", voxels), SHAPE)


def test_time_series_is_refused(tmp_path: Path) -> None:
    series = np.stack([smooth()] * 3, axis=-1)
    with pytest.raises(DataError, match="wrong shape 24x26x22x3"):
        read_voxels(nifti(tmp_path / "a.nii.gz", series), SHAPE)


def test_voxel_offset_beyond_any_header_is_refused(tmp_path: Path) -> None:
    file = set_header_field(nifti(tmp_path / "a.nii.gz"), "vox_offset", 2.0**30)
    with pytest.raises(DataError, match=r"corrupt|the voxels begin at byte"):
        read_voxels(file, SHAPE)


@pytest.mark.parametrize("name", ["a.nii.gz", "a.nii"])
def test_voxels_that_begin_in_the_header_are_refused(name: str, tmp_path: Path) -> None:
    """Otherwise nibabel reads the 352 bytes before them as the first voxels."""
    file = set_header_field(nifti(tmp_path / "a.nii.gz"), "vox_offset", 0)
    if name.endswith(".nii"):
        (tmp_path / name).write_bytes(gzip.decompress(file.read_bytes()))
    with pytest.raises(DataError, match="the voxels begin at byte 0, in the header"):
        read_voxels(tmp_path / name, SHAPE)


@pytest.mark.parametrize(("largest", "is_read"), [(1e14, True), (1e18, False), (-3e38, False)])
def test_voxels_too_large_for_float32_to_standardise_are_refused(largest: float, is_read: bool, tmp_path: Path) -> None:
    voxels = smooth().astype(np.float32) * np.float32(largest / smooth().max())
    file = nifti(tmp_path / "a.nii.gz", voxels)
    if is_read:
        standardised = build_preprocessing(1)(read_voxels(file, SHAPE))
        assert standardised.isfinite().all()
        assert float(standardised.std()) == pytest.approx(1, abs=1e-3)
    else:
        with pytest.raises(DataError, match=r"a voxel of .*; expected at most 1e\+15: rescale the image"):
            read_voxels(file, SHAPE)


def test_both_versions_of_the_format_and_plain_files_are_read(tmp_path: Path) -> None:
    for name, kind in (("a.nii.gz", nib.Nifti2Image), ("b.nii", nib.Nifti1Image)):
        assert np.array_equal(read_voxels(nifti(tmp_path / name, kind=kind), SHAPE), smooth())


def test_other_image_formats_are_refused(tmp_path: Path) -> None:
    file = nifti(tmp_path / "a.img", kind=nib.Nifti1Pair)
    with pytest.raises(DataError, match="is not a NIfTI file but Nifti1Pair"):
        read_voxels(file, SHAPE)
