"""Cases of a segmentation: found in BIDS, in Decathlon folders and by patterns, with what is wrong with each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.data.bids import index_cases
from flare_sparse.tasks.data.cases import (
    CaseFiles,
    CaseSettings,
    Pairs,
    describe_left_out,
    find_cases,
    find_classes,
    find_images,
    load_cases,
)
from flare_sparse.tasks.task import SiteData


def touch(folder: Path, *names: str) -> Path:
    """Create empty files; finding cases reads no image."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.fixture
def bids(tmp_path: Path) -> Path:
    """Two subjects, one with two sessions, and a table of sites."""
    touch(
        tmp_path,
        "sub-1/ses-a/anat/sub-1_ses-a_T1w.nii.gz",
        "sub-1/ses-b/anat/sub-1_ses-b_T1w.nii.gz",
        "sub-2/anat/sub-2_T1w.nii.gz",
        "sub-2/anat/sub-2_FLAIR.nii.gz",
        "derivatives/manual/sub-1/ses-a/anat/sub-1_ses-a_dseg.nii.gz",
        "derivatives/manual/sub-2/anat/sub-2_dseg.nii.gz",
        "derivatives/model/sub-2/anat/sub-2_desc-unet_dseg.nii.gz",
    )
    (tmp_path / "participants.tsv").write_text("participant_id\tsite\nsub-1\tA\nsub-2\tB\n")
    return tmp_path


def test_bids_cases_are_sessions_with_the_row_of_their_subject(bids: Path) -> None:
    cases = find_cases(bids, derivative="manual")
    assert list(cases) == ["sub-1_ses-a", "sub-1_ses-b", "sub-2"]
    assert [case.subject for case in cases.values()] == ["sub-1", "sub-1", "sub-2"]
    labels = [case.labels and case.labels.name for case in cases.values()]
    assert labels == ["sub-1_ses-a_dseg.nii.gz", None, "sub-2_dseg.nii.gz"]
    assert [case.problem for case in cases.values()] == [""] * 3
    cohort = index_cases(cases)
    assert cohort.columns["site"].tolist() == ["A", "A", "B"]
    assert cohort.subjects == ("sub-1", "sub-1", "sub-2")
    # nnU-Net's file for the task nnunet lists no cases.
    (bids / "dataset.json").write_text(json.dumps({"channel_names": {"0": "T1w"}, "labels": {"background": 0}}))
    assert find_cases(bids, derivative="manual") == cases
    images = [{"image": "sub-2/anat/sub-2_T1w.nii.gz", "label": "derivatives/manual/sub-2/anat/sub-2_dseg.nii.gz"}]
    (bids / "dataset.json").write_text(json.dumps({"training": images}))
    assert list(find_cases(bids)) == ["sub-2_dseg"]


def test_rows_without_a_folder_and_folders_without_a_row_are_named(bids: Path) -> None:
    cases = find_cases(bids)
    (bids / "participants.tsv").write_text("participant_id\tsite\nsub-2\tB\nsub-99\tB\n")
    assert describe_left_out(cases, bids)[-2:] == [
        "1 rows of participants.tsv have no folder with images: sub-99",
        "1 folders have no row in participants.tsv: sub-1",
    ]


def test_files_that_macos_writes_beside_images_are_no_images(bids: Path, tmp_path: Path) -> None:
    touch(bids, "sub-2/anat/._sub-2_T1w.nii.gz", "derivatives/manual/sub-2/anat/._sub-2_dseg.nii.gz")
    case = find_cases(bids, derivative="manual")["sub-2"]
    assert ([file.name for file in case.images], case.problem) == (["sub-2_T1w.nii.gz"], "")
    folder = touch(tmp_path / "pairs", "t1/a_1.nii.gz", "t1/._a_1.nii.gz", "seg/1.nii.gz", "seg/._1.nii.gz")
    assert list(find_cases(folder, pairs=Pairs(images=["t1/*{case}.nii.gz"], labels="seg/{case}.nii.gz"))) == ["1"]
    assert list(find_images(folder / "seg", ("T1w",), "*", None)) == ["1"]


def test_two_label_maps_of_a_case_are_a_problem_that_names_the_setting(bids: Path) -> None:
    cases = find_cases(bids)
    assert "2 label maps derivatives/manual/sub-2" in cases["sub-2"].label_problem
    assert "set task.derivative or task.pairs" in cases["sub-2"].label_problem
    assert find_cases(bids, derivative="mod*")["sub-2"].label_problem == ""


def test_each_suffix_is_one_image_of_a_case(bids: Path) -> None:
    cases = find_cases(bids, ("T1w", "FLAIR"), "manual")
    assert [file.name for file in cases["sub-2"].images] == ["sub-2_T1w.nii.gz", "sub-2_FLAIR.nii.gz"]
    assert cases["sub-1_ses-a"].problem == "0 images anat/*_FLAIR.nii.gz; expected one"


def test_decathlon_folder_has_the_training_cases_of_its_index(tmp_path: Path) -> None:
    entries = [{"image": f"./imagesTr/h_{n}.nii.gz", "label": f"./labelsTr/h_{n}.nii.gz"} for n in (3, 1)]
    (tmp_path / "dataset.json").write_text(json.dumps({"training": entries, "test": ["./imagesTs/h_9.nii.gz"]}))
    cases = find_cases(tmp_path)
    assert list(cases) == ["h_1", "h_3"]
    assert cases["h_1"].images == (tmp_path / "imagesTr/h_1.nii.gz",)
    assert cases["h_1"].labels == tmp_path / "labelsTr/h_1.nii.gz"
    assert index_cases(cases).columns == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        ('{"labels": {}}', "for the names of nnU-Net set task.pairs.*KeyError"),
        ('{"training": [{"image": "a", "label": "b"}, {"image": "c", "label": "b"}]}', "b occurs twice"),
        ("[" * 100_000, "RecursionError"),
    ],
    ids=["no JSON", "no training", "a case twice", "too deep"],
)
def test_malformed_index_of_a_decathlon_folder_is_explained(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=message):
        find_cases(tmp_path)


def test_pairs_are_matched_by_the_identifier_in_their_names(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "imagesTr/a_1_0000.nii.gz", "imagesTr/a_1_0001.nii.gz", "labelsTr/a_1.nii.gz",
        "imagesTr/b_0000.nii.gz", "labelsTr/b.nii.gz",
        "imagesTr/notes_0002.nii.gz",
    )  # fmt: skip
    pairs = Pairs(
        images=("imagesTr/{case}_0000.nii.gz", "imagesTr/{case}_0001.nii.gz"), labels="labelsTr/{case}.nii.gz"
    )
    cases = find_cases(tmp_path, pairs=pairs)
    assert [file.name for file in cases["a_1"].images] == ["a_1_0000.nii.gz", "a_1_0001.nii.gz"]
    assert cases["a_1"].labels == tmp_path / "labelsTr/a_1.nii.gz"
    assert cases["b"].problem == "0 files imagesTr/b_0001.nii.gz; expected one"
    assert list(cases) == ["a_1", "b"]


def test_identifier_that_stands_twice_in_a_pattern_is_the_same_twice(tmp_path: Path) -> None:
    touch(tmp_path, "p1/p1_ct.nii.gz", "p1/p1_mask.nii.gz", "p2/p3_ct.nii.gz")
    cases = find_cases(tmp_path, pairs=Pairs(images=("{case}/{case}_ct.nii.gz",), labels="{case}/{case}_mask.nii.gz"))
    assert list(cases) == ["p1"]


@pytest.mark.parametrize(
    ("image", "cases"),
    [("c{case}*.nii.gz", ["10", "11"]), ("{case}.nii.gz", ["c10", "c11"]), ("{case}*", ["c10", "c11"])],
)
def test_label_maps_that_match_the_pattern_of_images_are_no_images(
    tmp_path: Path, image: str, cases: list[str]
) -> None:
    touch(tmp_path, *(f"c{number}{kind}.nii.gz" for number in (10, 11) for kind in ("", "_seg")))
    labels = "c{case}_seg.nii.gz" if image.startswith("c") else "{case}_seg.nii.gz"
    cases_by_name = find_cases(tmp_path, pairs=Pairs(images=(image,), labels=labels))
    assert list(cases_by_name) == cases
    for case, number in zip(cases_by_name.values(), (10, 11), strict=True):
        assert (case.images, case.problem) == ((tmp_path / f"c{number}.nii.gz",), "")
        assert case.labels == tmp_path / f"c{number}_seg.nii.gz"


def test_pattern_of_label_maps_that_matches_every_image_is_a_problem_of_each_case(tmp_path: Path) -> None:
    touch(tmp_path, "c1_img.nii.gz", "c1_seg.nii.gz")
    cases = find_cases(tmp_path, pairs=Pairs(images=("{case}_img.nii.gz",), labels="{case}_*.nii.gz"))
    assert cases["c1"].label_problem == "2 files c1_*.nii.gz; expected one"


def test_prediction_finds_cases_as_training_does(tmp_path: Path) -> None:
    touch(tmp_path, "c1_img.nii.gz", "c1_seg.nii.gz", "c2_img.nii.gz")
    pairs = Pairs(images=("{case}_img.nii.gz",), labels="{case}_seg.nii.gz")
    assert list(find_images(tmp_path, ("T1w",), "*", pairs)) == ["c1", "c2"]
    assert list(find_images(tmp_path, ("T1w",), "*", None)) == ["c1_img", "c1_seg", "c2_img"]
    assert list(find_images(tmp_path / "c1_img.nii.gz", ("T1w",), "*", pairs)) == ["c1_img"]
    with pytest.raises(DataError, match="no cases to segment"):
        find_images(touch(tmp_path / "empty"), ("T1w",), "*", pairs)


def test_prediction_prefers_the_images_of_a_folder_to_data_sets_beside_them(tmp_path: Path) -> None:
    touch(tmp_path, "scan.nii.gz", "old/sub-1/anat/sub-1_T1w.nii.gz")
    (tmp_path / "dataset.json").write_text("{}")
    assert list(find_images(tmp_path, ("T1w",), "*", None)) == ["scan"]
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "scan.nii.gz").unlink()
    assert list(find_images(tmp_path, ("T1w",), "*", None)) == ["old/sub-1"]


def test_two_images_that_would_have_one_prediction_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "c1.nii", "c1.nii.gz")
    with pytest.raises(DataError, match=r"c1.nii and c1.nii.gz are images of one case; remove one of them"):
        find_images(tmp_path, ("T1w",), "*", None)


@pytest.mark.parametrize("pattern", ["/etc/{case}.nii.gz", "../{case}.nii.gz", "**/{case}.nii.gz", "image.nii.gz"])
def test_pattern_cannot_leave_the_folder_of_the_data(pattern: str) -> None:
    with pytest.raises(ValidationError, match="expected"):
        Pairs(images=(pattern,), labels="{case}.nii.gz")


def test_folders_of_several_data_sets_are_sites(tmp_path: Path) -> None:
    for site in ("north", "south"):
        touch(tmp_path, f"{site}/sub-1/anat/sub-1_T1w.nii.gz", f"{site}/derivatives/m/sub-1/anat/sub-1_dseg.nii.gz")
    cases = find_cases(tmp_path)
    assert list(cases) == ["north/sub-1", "south/sub-1"]
    assert [case.subject for case in cases.values()] == ["north/sub-1", "south/sub-1"]
    assert index_cases(cases).columns["site"].tolist() == ["north", "south"]


def test_folder_without_cases_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no cases to segment; expected a BIDS data set .* or a folder of such folders"
    ):
        find_cases(tmp_path)
    with pytest.raises(DataError, match=r"expected files x/\{case\}.nii, y/\{case\}.nii"):
        find_cases(tmp_path, pairs=Pairs(images=("x/{case}.nii",), labels="y/{case}.nii"))


def test_classified_case_without_an_image_is_explained(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text('[{"image": [], "label": 0}]')
    with pytest.raises(DataError, match=r"dataset\.json: expected \[\{\"image\": FILE, .* found IndexError"):
        find_classes(tmp_path)


def test_images_in_folders_that_are_no_class_and_of_other_formats_are_counted(tmp_path: Path) -> None:
    for name in ("0/a.png", "1/b.JPG", "1/c.tif", "benign/d.png", "1/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    cases = find_classes(tmp_path)
    assert list(cases) == ["0/a.png", "1/b.JPG"]
    expected = "2 images are left out, since no case has them: 1/c.tif, benign/d.png"
    assert describe_left_out(cases, tmp_path) == [expected]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("evaluated", [True, False])
def test_cases_are_read_once_for_their_part_and_at_each_access_only_without_cache(
    tmp_path: Path, cache: bool, evaluated: bool
) -> None:
    files = {name: CaseFiles((tmp_path / name,), None, subject=name) for name in "abcdefghij"}
    screened: list[str] = []
    read: list[str] = []

    def read_case(case: CaseFiles) -> str:
        read.append(case.subject)
        return case.subject.upper()

    def screen(case: CaseFiles) -> str:
        screened.append(case.subject)
        return case.subject.upper()

    def read_again(case: CaseFiles) -> str:
        read.append(case.subject)
        return f"{case.subject.upper()}!"

    own = read_again if evaluated else None
    data, settings = SiteData("a", tmp_path), CaseSettings(cache=cache)
    examples = load_cases(settings, data, 1, files, read_case, screen=screen, read_evaluated=own)
    assert (screened, read) == (list(files), list(examples.test_ids) if cache and evaluated else [])
    parts: list[Any] = [examples.train, examples.test]
    items = [[part[index] for index in range(len(part))] for part in parts]
    end = "!" if evaluated else ""
    assert items == [
        [name.upper() for name in examples.train_ids], [f"{name.upper()}{end}" for name in examples.test_ids]
    ]  # fmt: skip
    assert sorted(read) == (sorted(examples.test_ids if evaluated else ()) if cache else list(files))


def test_sessions_of_a_subject_are_in_one_part_and_count_once(tmp_path: Path) -> None:
    files = {f"{name}{visit}": CaseFiles((tmp_path,), None, subject=name) for name in "abcde" for visit in "12"}
    examples = load_cases(CaseSettings(), SiteData("a", tmp_path), 1, files, lambda case: case.subject)
    assert (examples.n_train, examples.count_train_subjects(), examples.n_test) == (8, 4, 2)
    assert [name[0] for name in examples.train_ids] == list(examples.train_subjects)
    assert not set(examples.train_subjects) & set(examples.test_subjects)
