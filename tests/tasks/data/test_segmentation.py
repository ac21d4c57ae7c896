"""Images and label maps: any orientation, spacing, number of channels and label values, and each fault by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.data.cases import CaseFiles
from flare_sparse.tasks.data.segmentation import Preparation, read_item

PLAIN: dict[str, Any] = {
    "channels": 1, "spacing": None, "window": None, "normalization": "none", "classes": {"front": 1, "back": 5},
    "other_labels": "refuse",
}  # fmt: skip


def write(file: Path, values: np.ndarray, affine: Sequence[float] | np.ndarray = (1, 1, 1)) -> Path:
    matrix = affine if isinstance(affine, np.ndarray) else np.diag([*affine, 1.0])
    nib.save(nib.Nifti1Image(values, matrix), file)
    return file


def read(files: CaseFiles, **settings: Any) -> Any:
    return read_item(files, Preparation(**{**PLAIN, **settings}), on_grid=False)


@pytest.fixture
def values() -> np.ndarray:
    return np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)


@pytest.fixture
def labels() -> np.ndarray:
    labels = np.zeros((4, 5, 6), np.int16)
    labels[1, 2, 3], labels[3, 0, 0] = 5, 1
    return labels


@pytest.fixture
def files(tmp_path: Path, values: np.ndarray, labels: np.ndarray) -> CaseFiles:
    return CaseFiles((write(tmp_path / "a.nii.gz", values),), write(tmp_path / "l.nii.gz", labels))


def test_values_of_a_label_map_become_the_numbers_of_their_classes(files: CaseFiles, labels: np.ndarray) -> None:
    image, classes, spacing = read(files)
    assert image.shape == (1, 4, 5, 6)
    assert classes.dtype == torch.uint8
    assert classes.tolist() == (labels == 1).astype(int).__add__(2 * (labels == 5)).tolist()
    assert spacing.tolist() == [1, 1, 1]


def test_image_and_labels_are_turned_to_ras_together(tmp_path: Path, values: np.ndarray, labels: np.ndarray) -> None:
    # The first axis runs from right to left, and the other two are exchanged.
    affine = np.array([[-2.0, 0, 0, 0], [0, 0, 3.0, 0], [0, 4.0, 0, 0], [0, 0, 0, 1]])
    turned = CaseFiles(
        (write(tmp_path / "a.nii", values, affine),), write(tmp_path / "l.nii", labels.astype(np.uint8), affine)
    )
    image, classes, spacing = read(turned)
    assert torch.equal(image[0], torch.from_numpy(values[::-1].transpose(0, 2, 1).copy()))
    assert classes[2, 3, 2] == 2
    assert classes[0, 0, 0] == 1
    assert spacing.tolist() == [2, 3, 4]


def test_image_is_resampled_and_its_label_map_kept_for_evaluation(files: CaseFiles, labels: np.ndarray) -> None:
    preparation = Preparation(**{**PLAIN, "spacing": (2.0, 1.0, 0.5)})
    image, classes, spacing = read_item(files, preparation, on_grid=False)
    assert (image.shape, classes.shape, spacing.tolist()) == ((1, 2, 5, 12), (4, 5, 6), [1, 1, 1])
    # The mean of two voxels along the first axis; the last one is refined.
    assert image[0, 0, 0, 0] == (0 + 30) / 2
    _, trained, _ = read_item(files, preparation)
    assert trained.shape == (2, 5, 12)
    assert trained[0, 2, 6:8].tolist() == [2, 2]


def test_normalization_is_over_the_volume_or_over_voxels_that_are_not_zero(files: CaseFiles) -> None:
    whole = read(files, normalization="volume")[0]
    assert (float(whole.mean()), float(whole.std(correction=0))) == (pytest.approx(0, abs=1e-6), pytest.approx(1))
    nonzero = read(files, normalization="nonzero")[0].flatten()
    assert nonzero[0] == 0
    assert float(nonzero[1:].mean()) == pytest.approx(0, abs=1e-6)
    assert float(nonzero[1:].std(correction=0)) == pytest.approx(1)


def test_window_clips_intensities_first(files: CaseFiles) -> None:
    image = read(files, window=(10.0, 20.0))[0]
    assert (image.min(), image.max()) == (10, 20)


def test_channels_are_files_or_the_fourth_axis(tmp_path: Path, files: CaseFiles, values: np.ndarray) -> None:
    two = CaseFiles((*files.images, write(tmp_path / "b.nii.gz", 2 * values)), files.labels)
    one = CaseFiles((write(tmp_path / "c.nii.gz", np.stack([values, 2 * values], -1)),), files.labels)
    assert torch.equal(read(two, channels=2)[0], read(one, channels=2)[0])
    with pytest.raises(DataError, match=r"a.nii.gz: channels: 2; expected 1: set task.channels"):
        read(two)


def test_other_labels_are_refused_or_background(files: CaseFiles) -> None:
    with pytest.raises(DataError, match=r"l.nii.gz: label 5 is none of task.classes.*other_labels: background"):
        read(files, classes={"front": 1})
    assert int(read(files, classes={"front": 1}, other_labels="background")[1].sum()) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"labels": np.zeros((4, 5, 7), np.uint8)}, "l.nii.gz is 4x5x7, a.nii.gz is 4x5x6; expected the same grid"),
        ({"affine": (1, 1, 1.5)}, r"l.nii.gz lies up to 3\.0 mm from a.nii.gz; expected the same affine"),
        ({"labels": np.full((4, 5, 6), 0.5, np.float32)}, r"label 0\.5; expected whole numbers"),
        ({"labels": np.zeros((4, 5, 6, 2), np.uint8)}, "expected one label for each voxel"),
        ({"image": np.ones((4, 5, 6), np.float32)}, "all voxels of a.nii.gz are equal"),
        ({"image": np.full((4, 5, 6), np.nan, np.float32)}, "120 voxels of a.nii.gz are NaN or infinite"),
        ({"image": np.zeros((4, 5), np.float32)}, "wrong shape 4x5 in a.nii.gz; expected a volume"),
    ],
)
def test_files_that_do_not_fit_are_explained(
    tmp_path: Path, files: CaseFiles, labels: np.ndarray, damage: dict[str, Any], message: str
) -> None:
    if "image" in damage:
        write(tmp_path / "a.nii.gz", damage["image"])
    else:
        write(tmp_path / "l.nii.gz", damage.get("labels", labels), damage.get("affine", (1, 1, 1)))
    with pytest.raises(DataError, match=message):
        read(files)


def test_case_without_labels_or_with_a_problem_is_refused(files: CaseFiles) -> None:
    with pytest.raises(DataError, match="there is no label map"):
        read(CaseFiles(files.images, None))
    with pytest.raises(DataError, match=r"^two of them$"):
        read(CaseFiles(files.images, files.labels, problem="two of them"))


def test_header_that_declares_too_many_voxels_allocates_nothing(tmp_path: Path, files: CaseFiles) -> None:
    header = nib.Nifti1Header()
    header.set_data_shape((32767, 32767, 32767))
    header["vox_offset"] = 352
    (tmp_path / "a.nii").write_bytes(header.binaryblock + bytes(4))
    with pytest.raises(DataError, match=r"32767x32767x32767 voxels; expected at most 268435456 in all"):
        read(CaseFiles((tmp_path / "a.nii",), files.labels))
