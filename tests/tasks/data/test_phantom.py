"""Phantoms: a reproducible BIDS data set from which age and sex can be learned."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.brain import build_preprocessing, read_voxels
from flare_sparse.tasks.data.bids import read_cohort, read_subjects
from flare_sparse.tasks.data.phantom import CSF, Person, render_volume, write_phantoms


def compute_digest(folder: Path, pattern: str = "**/*") -> dict[str, str]:
    files = sorted(file for file in folder.glob(pattern) if file.is_file())
    return {str(f.relative_to(folder)): sha256(f.read_bytes()).hexdigest() for f in files}


def test_phantoms_form_a_bids_data_set(tmp_path: Path) -> None:
    out = write_phantoms(tmp_path / "new" / "brains", sites=2, subjects=3, seed=0)
    index = read_cohort(out)
    assert json.loads((out / "dataset_description.json").read_text())["BIDSVersion"] == "1.9.0"
    assert index.ids == ("sub-01001", "sub-01002", "sub-01003", "sub-02001", "sub-02002", "sub-02003")
    assert index.columns["site"].tolist() == ["site-1"] * 3 + ["site-2"] * 3
    assert list(index.columns) == ["participant_id", "age", "sex", "site"]
    image = nib.load(read_subjects(out)["sub-01001"].require_images()[0])
    assert (image.shape, image.get_data_dtype(), nib.aff2axcodes(image.affine)) == (
        (52, 64, 52),
        "uint8",
        ("R", "A", "S"),
    )
    assert image.header.get_zooms() == (3.0, 3.0, 3.0)


def test_same_seed_gives_same_bytes_and_more_subjects_keep_the_others(tmp_path: Path) -> None:
    shape = (20, 24, 20)
    one, two = (write_phantoms(tmp_path / name, 2, 2, seed=7, shape=shape) for name in ("one", "two"))
    assert compute_digest(one) == compute_digest(two)
    more = compute_digest(write_phantoms(tmp_path / "more", 3, 4, seed=7, shape=shape), "sub-*/**/*")
    assert compute_digest(one, "sub-*/**/*").items() <= more.items()
    other = write_phantoms(tmp_path / "other", 2, 2, seed=8, shape=shape)
    assert not set(compute_digest(one, "sub-*/**/*").values()) & set(compute_digest(other, "sub-*/**/*").values())


def test_ventricles_widen_and_cortex_thins_with_age() -> None:
    def volumes(age: float) -> tuple[float, float]:
        person = Person(age, age, 50.0, 20.0, 1.0, np.ones(3), np.zeros(3), np.zeros(3))
        seen = render_volume(person, (52, 64, 52))
        middle = seen[16:36, 16:48, 18:36]
        return float((middle < (CSF + 0.62) / 2).mean()), float(((seen > 0.5) & (seen < 0.75)).mean())

    ventricles, grey = zip(*(volumes(age) for age in (20.0, 50.0, 80.0)), strict=True)
    assert ventricles[0] < ventricles[1] < ventricles[2]
    assert grey[0] > grey[1] > grey[2]


def test_spots_change_a_brain_but_not_the_mean_over_brains() -> None:
    def render(texture: float, phase: float) -> np.ndarray:
        spots = np.array([phase, 0.5, 0.5])
        return render_volume(Person(50.0, 50.0, 50.0, texture, 1.0, np.ones(3), np.zeros(3), spots), (52, 64, 52))

    plain, one, other = render(20.0, 0.5), render(80.0, 0.5), render(80.0, 0.5 + np.pi)
    assert np.abs(one - plain).max() > 0.3
    assert np.abs((one + other) / 2 - plain).max() < 1e-6


@pytest.mark.long
def test_age_and_sex_are_learnable_but_not_trivial(tmp_path: Path) -> None:
    """Ridge regression on voxels of 12 mm: clearly better than the mean, far from exact."""
    subjects = read_subjects(write_phantoms(tmp_path / "p", sites=4, subjects=30, seed=0)).values()
    prepare = build_preprocessing(4)
    x = np.stack([prepare(read_voxels(s.require_images()[0], (52, 64, 52))).numpy().ravel() for s in subjects])
    train = np.arange(len(x)) % 4 != 0

    def predicted(y: np.ndarray) -> np.ndarray:
        kernel = x @ x.T / x.shape[1]
        weights = np.linalg.solve(
            kernel[np.ix_(train, train)] + 0.003 * np.eye(train.sum()), y[train] - y[train].mean()
        )
        return np.asarray(kernel[np.ix_(~train, train)] @ weights + y[train].mean())

    age, sex = np.array([s.parse_age() for s in subjects]), np.array([s.parse_sex() for s in subjects])
    error = np.abs(predicted(age) - age[~train]).mean()
    assert 3.0 < error < 0.65 * np.abs(age[~train] - age[train].mean()).mean()
    assert 0.7 < ((predicted(sex) > 0.5) == (sex[~train] > 0.5)).mean() < 1.0


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(DataError, match="is not empty; choose another folder"):
        write_phantoms(tmp_path, 1, 1, 0)


@pytest.mark.parametrize(("sites", "subjects"), [(0, 1), (1, 0), (100, 1), (1, 1000)])
def test_too_few_or_too_many_sites_or_subjects_are_refused(tmp_path: Path, sites: int, subjects: int) -> None:
    with pytest.raises(DataError, match="expected 1 to 99 sites and 1 to 999 subjects"):
        write_phantoms(tmp_path / "p", sites, subjects, 0)


def test_label_map_marks_the_tissues_of_the_same_brain(tmp_path: Path) -> None:
    plain, labelled = (
        write_phantoms(tmp_path / name, 1, 2, 7, labels=name == "labelled") for name in ("p", "labelled")
    )
    assert not (plain / "derivatives").exists()
    name = "sub-01001/anat/sub-01001_T1w.nii.gz"
    volume = nib.load(labelled / name)
    assert np.array_equal(np.asarray(volume.dataobj), np.asarray(nib.load(plain / name).dataobj))
    labels = nib.load(labelled / "derivatives/anatomy/sub-01001/anat/sub-01001_dseg.nii.gz")
    values, voxels = np.asarray(labels.dataobj), np.asarray(volume.dataobj)
    assert np.array_equal(labels.affine, volume.affine)
    grey, white, ventricles = (voxels[values == number].mean() for number in (1, 2, 3))
    assert white > grey > ventricles > 0
    assert all(100 < (values == number).sum() < values.size / 4 for number in (1, 2, 3))
