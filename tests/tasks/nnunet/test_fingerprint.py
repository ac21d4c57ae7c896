"""Fingerprints merge exactly, and the plan of all sites is nnU-Net's plan of the pooled data."""

from __future__ import annotations

import json
import shutil
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from nnunet_data import DATASET, SHAPE, require_nnunet, write_bids, write_raw
from skips import require

from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.tasks.nnunet.fingerprint import (
    Fingerprint,
    Intensities,
    compute_fingerprint,
    merge_fingerprints,
    round_intensities,
)
from flare_sparse.tasks.nnunet.plan import build_plan
from flare_sparse.tasks.nnunet.raw import find_raw_cases

NAME = "Dataset004_Hippocampus"
SAMPLES = 100_000
CASES = (("A", 3), ("B", 2), ("C", 2))
RELATIVE_ERROR = 2.0**-13


def build_fingerprint(values: np.ndarray, shape: tuple[int, int, int] = (4, 5, 6)) -> Fingerprint:
    """Return the fingerprint of one case with these samples."""
    bins, counts = np.unique(round_intensities(values), return_counts=True)
    part = Intensities(values=tuple(bins.tolist()), counts=tuple(counts.tolist()))
    geometry = (((1.0, 1.0, 2.0), tuple(map(float, shape))),)
    return Fingerprint(
        dataset=DATASET,
        reader="SimpleITKIO",
        samples_per_case=len(values),
        geometry=geometry,
        relative_sizes=(0.5,),
        intensities=(part,),
    )


def test_bins_are_within_the_stated_error_and_whole_numbers_are_exact() -> None:
    values = (np.random.default_rng(0).normal(0, 1, 50_000) * 10.0 ** np.arange(-5, 5).repeat(5000)).astype(np.float32)
    error = np.abs(round_intensities(values) - values)
    assert float((error / np.abs(values)).max()) <= RELATIVE_ERROR
    whole = np.arange(-8192, 8193, dtype=np.float32)
    assert np.array_equal(round_intensities(whole), whole)


def test_merged_statistics_are_those_of_the_pooled_samples_in_any_order() -> None:
    rng = np.random.default_rng(1)
    samples = [rng.normal(mean, 30, 1001).astype(np.float32) for mean in (-200, 40, 700)]
    parts = [build_fingerprint(values, (4, 5, size)) for size, values in enumerate(samples, start=6)]
    merged = merge_fingerprints(parts)
    assert merge_fingerprints(parts[::-1]) == merged
    found = merged.to_nnunet()
    assert found["shapes_after_crop"] == [[4, 5, 6], [4, 5, 7], [4, 5, 8]]
    pooled = np.concatenate(samples).astype(np.float64)
    channel = found["foreground_intensity_properties_per_channel"]["0"]
    size = float(np.sqrt(np.square(pooled).mean()))
    assert channel["mean"] == pytest.approx(pooled.mean(), abs=RELATIVE_ERROR * size)
    assert channel["std"] == pytest.approx(pooled.std(), abs=RELATIVE_ERROR * size)
    percentiles = {"min": 0, "percentile_00_5": 0.5, "median": 50, "percentile_99_5": 99.5, "max": 100}
    for name, q in percentiles.items():
        assert channel[name] == pytest.approx(np.percentile(pooled, q), rel=RELATIVE_ERROR)


def test_sites_with_other_labels_or_samples_are_refused() -> None:
    one = build_fingerprint(np.arange(1, 9, dtype=np.float32))
    labels = {"background": 0, "tumour": 1}
    other = one.model_copy(update={"dataset": one.dataset.model_copy(update={"labels": labels})})
    with pytest.raises(ConfigError, match=r"differ in dataset: .*front.*tumour.*dataset\.json"):
        merge_fingerprints([one, other])
    with pytest.raises(ConfigError, match=r"differ in samples_per_case: 8 and 9; .* same --total"):
        merge_fingerprints([one, one.model_copy(update={"samples_per_case": 9})])
    with pytest.raises(ConfigError, match="two of the fingerprints are the same"):
        merge_fingerprints([one, one])
    plane = one.model_copy(update={"geometry": (((1.0, 1.0), (4.0, 5.0)),)})
    with pytest.raises(ConfigError, match="two dimensions and others three"):
        merge_fingerprints([one, plane])


DAMAGE: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "a bin without its count": (("intensities", 0, "counts"), [1] * 7),
    "a count of many sites": (("intensities", 0, "counts", 0), 10**15),
    "bins in no order": (("intensities", 0, "values", 0), 5.5),
    "an infinite bin": (("intensities", 0, "values", 7), float("inf")),
    "no channel": (("intensities",), []),
    "spacing of nothing": (("geometry", 0, 0, 1), 0.0),
    "an infinite side": (("geometry", 0, 1, 2), float("inf")),
    "a negative side": (("geometry", 0, 1, 2), -4.0),
    "spacing of two axes and a shape of three": (("geometry", 0, 0), [1.0, 1.0]),
    "two sizes of one case": (("relative_sizes",), [0.5, 0.5]),
    "channels by position": (("dataset", "channel_names"), ["MRI"]),
    "labels by value": (("dataset", "labels"), {"0": "background"}),
    "no channel_names": (("dataset",), {"labels": {"background": 0}, "file_ending": ".nii.gz"}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_fingerprint_is_refused(name: str) -> None:
    content = build_fingerprint(np.arange(1, 9, dtype=np.float32)).model_dump(mode="json")
    assert Fingerprint.model_validate_json(json.dumps(content)).cases == 1
    (*path, last), value = DAMAGE[name]
    place: Any = content
    for key in path:
        place = place[key]
    place[last] = value
    with pytest.raises(ValueError, match="validation error"):
        Fingerprint.model_validate_json(json.dumps(content))


def test_raw_data_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    folder = write_raw(tmp_path / "raw", 1)
    assert list(find_raw_cases(folder)) == ["case00"]
    (folder / "dataset.json").write_text(json.dumps({**DATASET, "channel_names": {"0": "T1", "1": "T2"}}))
    assert find_raw_cases(folder)["case00"].problem == "1 images; dataset.json names 2 channels"
    (folder / "dataset.json").write_text("{}")
    with pytest.raises(
        DataError, match="channel_names: Field required; labels: Field required; file_ending: Field required"
    ):
        find_raw_cases(folder)
    (folder / "dataset.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"expected the dataset\.json of nnU-Net's raw data: maximum recursion"):
        find_raw_cases(folder)
    listed = {"case00": {"images": ["a.nii.gz"], "label": "b.nii.gz"}}
    (folder / "dataset.json").write_text(json.dumps({**DATASET, "dataset": listed}))
    with pytest.raises(DataError, match=r"dataset lists the files of each case, .* remove the section"):
        find_raw_cases(folder)
    (folder / "dataset.json").write_text(json.dumps(DATASET))
    image = folder / "imagesTr" / "case00_0000.nii.gz"
    image.rename(image.with_name("case00_0001.nii.gz"))
    with pytest.raises(DataError, match=r"case00 lacks case00_0000\.nii\.gz"):
        find_raw_cases(folder)


def test_bids_cases_have_the_channels_as_suffixes(tmp_path: Path) -> None:
    folder = write_bids(tmp_path / "bids", write_raw(tmp_path / "raw", 3))
    cases = find_raw_cases(folder)
    assert {name: case.subject for name, case in cases.items()} == {
        "sub-0_ses-0": "sub-0", "sub-0_ses-1": "sub-0", "sub-1_ses-0": "sub-1"
    }  # fmt: skip
    assert [case.problem or case.label_problem for case in cases.values()] == [""] * 3
    (folder / "dataset.json").write_text(json.dumps({**DATASET, "channel_names": {"0": "FLAIR"}}))
    assert find_raw_cases(folder)["sub-0_ses-1"].problem == "0 images anat/*_FLAIR.nii.gz; expected one"
    with pytest.raises(DataError, match=r"sub-0_ses-0: 0 images anat/\*_FLAIR"):
        compute_fingerprint(folder, 10)
    shutil.rmtree(folder / "sub-0")
    shutil.rmtree(folder / "sub-1")
    with pytest.raises(DataError, match=r"none in BIDS: sub-\*/anat/\*_FLAIR\.nii\.gz"):
        find_raw_cases(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_infinite_voxels_are_named_with_their_case_or_left_out(tmp_path: Path) -> None:
    require_nnunet()
    folder = write_raw(tmp_path / "raw", 2)
    # SimpleITK, the default, reads them as 0.
    (folder / "dataset.json").write_text(json.dumps({**DATASET, "overwrite_image_reader_writer": "NibabelIO"}))
    voxels = np.full(SHAPE, np.inf, np.float32)
    nib.save(nib.Nifti1Image(voxels, np.eye(4)), folder / "imagesTr" / "case00_0000.nii.gz")
    with pytest.raises(DataError, match=r"case00: case00_0000\.nii\.gz: voxels are NaN or infinite"):
        compute_fingerprint(folder, 10)
    assert compute_fingerprint(folder, 10, skip_bad_subjects=True).cases == 1


@pytest.mark.slow
def test_few_cases_stay_at_the_site(tmp_path: Path) -> None:
    require_nnunet()
    folder = write_raw(tmp_path / "raw", 2)
    found = compute_fingerprint(folder, 1000)
    assert found.cases == 2
    assert "case0" not in found.model_dump_json()
    with pytest.raises(DataError, match="2 subjects have foreground, the minimum is 3"):
        compute_fingerprint(folder, 1000, least=3)
    (folder / "labelsTr" / "case01.nii.gz").unlink()
    with pytest.raises(DataError, match="case01: missing file: there is no label map"):
        compute_fingerprint(folder, 1000)


def plan_pooled(folders: dict[str, Path], root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the plans of nnU-Net's own extractor and planner on the cases of all folders."""
    from nnunetv2.experiment_planning.dataset_fingerprint import fingerprint_extractor
    from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner

    for kind in ("raw", "preprocessed", "results"):
        monkeypatch.setenv(f"nnUNet_{kind}", str(root / kind))
        (root / kind / NAME).mkdir(parents=True)
    listed = {
        f"{site}{name}": {"images": [str(case.images[0])], "label": str(case.labels)}
        for site, folder in folders.items()
        for name, case in find_raw_cases(folder).items()
    }
    content = {**DATASET, "labels": {"background": 0, "anterior": 1, "posterior": 2}, "numTraining": len(listed)}
    (root / "raw" / NAME / "dataset.json").write_text(json.dumps({**content, "dataset": listed}))
    # Threads in place of processes, each of which would import torch first.
    threads = SimpleNamespace(get_context=lambda _: SimpleNamespace(Pool=ThreadPool))
    monkeypatch.setattr(fingerprint_extractor, "multiprocessing", threads)
    extractor = fingerprint_extractor.DatasetFingerprintExtractor(NAME, 1)
    extractor.num_foreground_voxels_for_intensitystats = SAMPLES * len(listed)
    extractor.run()
    ExperimentPlanner(NAME).plan_experiment()
    return json.loads((root / "preprocessed" / NAME / "nnUNetPlans.json").read_text())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_plan_of_the_sites_is_nnunets_plan_of_the_pooled_hippocampi(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_nnunet()
    data = shared_data / "hippocampus"
    require(data.is_dir(), "the hippocampus cohort of ../shared/data is needed")
    rows = [line.split("\t") for line in (data / "participants.tsv").read_text().splitlines()]
    site = rows[0].index("site")
    folders = {}
    for name, count in CASES:
        folders[name] = tmp_path / name
        for part in ("imagesTr", "labelsTr"):
            (folders[name] / part).mkdir(parents=True)
        for subject in [row[0] for row in rows[1:] if row[site] == name][:count]:
            image = next(data.glob(f"{subject}/anat/*_T1w.nii.gz"))
            labels = next(data.glob(f"derivatives/*/{subject}/anat/*_dseg.nii.gz"))
            (folders[name] / "imagesTr" / f"{subject}_0000.nii.gz").symlink_to(image)
            (folders[name] / "labelsTr" / f"{subject}.nii.gz").symlink_to(labels)
        (folders[name] / "dataset.json").write_text(
            json.dumps({**DATASET, "labels": {"background": 0, "anterior": 1, "posterior": 2}})
        )

    merged = merge_fingerprints([compute_fingerprint(folder, SAMPLES) for folder in folders.values()])
    found = build_plan(merged, NAME)["plans"]
    expected = plan_pooled(folders, tmp_path / "nnunet", monkeypatch)
    intensities = "foreground_intensity_properties_per_channel"
    assert {name: value for name, value in found.items() if name != intensities} == {
        name: value for name, value in expected.items() if name != intensities
    }
    ours, theirs = found[intensities]["0"], expected[intensities]["0"]
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=RELATIVE_ERROR)
