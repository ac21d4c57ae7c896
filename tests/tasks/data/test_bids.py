"""BIDS data sets: subjects are found, and everything unusable about a subject is explained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.data.bids import CaseFiles, read_cohort, read_subjects
from flare_sparse.tasks.data.tables import read_table
from flare_sparse.tasks.task import SiteData


def dataset(folder: Path, table: str, images: tuple[str, ...] = ()) -> Path:
    """A BIDS folder with this table and empty image files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "participants.tsv").write_text(table)
    for image in images:
        file = folder / image
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return folder


def build(row: dict[str, str] | None = None) -> CaseFiles:
    return CaseFiles((), row={} if row is None else {"participant_id": "sub-01", **row})


TABLE = "participant_id\tage\tsex\tsite\nsub-02\t30.5\tF\tA\nsub-01\tn/a\tM\tB\n"


def test_subjects_are_sorted_with_row_and_first_image(tmp_path: Path) -> None:
    images = ("sub-01/anat/sub-01_T1w.nii.gz", "sub-02/anat/sub-02_run-2_T1w.nii.gz")
    path = dataset(tmp_path, TABLE, (*images, "sub-02/anat/sub-02_run-1_T1w.nii.gz", "sub-03/anat/sub-03_T2w.nii.gz"))
    subjects = read_subjects(path)
    assert list(subjects) == ["sub-01", "sub-02", "sub-03"]
    assert subjects["sub-01"].require_images()[0] == path / images[0]
    assert subjects["sub-02"].require_images()[0].name == "sub-02_run-1_T1w.nii.gz"
    assert (subjects["sub-02"].parse_age(), subjects["sub-02"].parse_sex(), subjects["sub-01"].parse_sex()) == (
        30.5,
        0.0,
        1.0,
    )


def test_files_that_macos_writes_beside_images_are_no_images(tmp_path: Path) -> None:
    path = dataset(tmp_path, TABLE, ("sub-01/anat/sub-01_T1w.nii.gz", "sub-01/anat/._sub-01_T1w.nii.gz"))
    assert read_subjects(path)["sub-01"].require_images()[0].name == "sub-01_T1w.nii.gz"


def test_cohort_has_all_columns_and_numeric_ages(tmp_path: Path) -> None:
    index = read_cohort(dataset(tmp_path, TABLE))
    assert index.ids == ("sub-01", "sub-02")
    assert index.columns["site"].tolist() == ["B", "A"]
    assert np.isnan(index.columns["age"][0])
    assert index.columns["age"][1] == 30.5


def test_bids_folders_become_natural_sites(tmp_path: Path) -> None:
    for name in ("North", "South"):
        dataset(tmp_path / name, TABLE)
    index = read_cohort(tmp_path)
    assert index.ids == ("North/sub-01", "North/sub-02", "South/sub-01", "South/sub-02")
    assert index.columns["site"].tolist() == ["North", "North", "South", "South"]


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (build(), "unknown participant: it has no row in participants.tsv"),
        (build({"sex": "M"}), "participants.tsv has no column 'age'"),
        (build({"age": "n/a"}), "age is missing in participants.tsv"),
        (build({"age": ""}), "age is missing in participants.tsv"),
        (build({"age": "old"}), "age 'old' in participants.tsv; expected years, 0 to 120"),
        (build({"age": "250"}), "age '250' in participants.tsv; expected years, 0 to 120"),
    ],
)
def test_unusable_age_is_explained(subject: CaseFiles, message: str) -> None:
    with pytest.raises(DataError) as caught:
        subject.parse_age()
    assert str(caught.value).startswith(message)


def test_unusable_sex_is_explained() -> None:
    with pytest.raises(DataError, match=r"sex 'O' in participants.tsv; expected F or 0 \(female\), M or 1 \(male\)"):
        build({"sex": "O"}).parse_sex()


def test_missing_image_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing file: no anat/\*_T1w.nii.gz"):
        read_subjects(dataset(tmp_path, TABLE))["sub-01"].require_images()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("subject\tage\nsub-01\t3\n", "no column 'participant_id'. Found: subject, age"),
        ("participant_id\tage\n../x\t3\n", "line 2: participant_id '../x'; expected sub- and letters or digits"),
        ("participant_id\nsub-01\n\nsub-01\n", "line 4: sub-01 occurs twice"),
        ("participant_id,age\nsub-01,3\n", "no column 'participant_id'"),
        ("participant_id\tage\nsub-01\t3\t4\n", "line 2 has 3 fields, the first line 2"),
        ("participant_id\tage\tage \nsub-01\t3\t4\n", "two columns 'age'; expected one"),
    ],
)
def test_malformed_table_is_refused_with_its_line(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_subjects(dataset(tmp_path, table))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("age (years, exact)", "3,5", "4"), ("dx (a, b, c)", "a,b,c", "a"), ("dx (0; 1; 2)", "0;1;2", "1")],
)
def test_marks_in_texts_divide_no_columns_of_a_table_of_tabs(
    tmp_path: Path, name: str, first: str, second: str
) -> None:
    subjects = read_subjects(dataset(tmp_path, f"participant_id\t{name}\nsub-01\t{first}\nsub-02\t{second}\n"))
    assert [subjects[subject].row[name] for subject in ("sub-01", "sub-02")] == [first, second]
    assert read_table(tmp_path / "participants.tsv").get_names(name) == [first, second]


def test_tables_have_no_quoting_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    table = 'participant_id\tdx\n\nsub-01\t"left\nsub-02\t"a" b\r\n\r\nsub-03\tn/a\n'
    subjects = read_subjects(dataset(tmp_path, table))
    assert {name: subject.row["dx"] for name, subject in subjects.items()} == {
        "sub-01": '"left',
        "sub-02": '"a" b',
        "sub-03": "",
    }


@pytest.mark.parametrize("table", ["", "\n", "participant_id\tage\n"])
def test_table_without_rows_lists_nobody(tmp_path: Path, table: str) -> None:
    subjects = read_subjects(dataset(tmp_path, table, ("sub-01/anat/sub-01_T1w.nii.gz",)))
    assert {name: (subject.is_listed, len(subject.images)) for name, subject in subjects.items()} == {
        "sub-01": (False, 1)
    }


def test_table_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "participants.tsv").write_bytes(b"participant_id\nsub-\xff\n")
    with pytest.raises(DataError, match="line 2 is not in UTF-8"):
        read_subjects(tmp_path)


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_folder_without_data_set_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"no BIDS data set; expected participants.tsv"):
        read_subjects(tmp_path / name)


def test_real_brains_have_the_expected_sites(shared_data: Path) -> None:
    index = read_cohort(shared_data / "brain_t1")
    assert len(index.ids) == 252
    assert dict(zip(*np.unique(index.columns["site"], return_counts=True), strict=True)) == {"IXI-HH": 180, "NSK": 72}
    assert (index.columns["age"].min() >= 19, index.columns["age"].max() <= 82) == (True, True)


def test_sessions_are_examples_of_their_subject_with_the_age_at_the_session(tmp_path: Path) -> None:
    images = ("sub-01/ses-a/anat/sub-01_ses-a_T1w.nii.gz", "sub-01/ses-b/anat/sub-01_ses-b_T1w.nii.gz")
    more = ("sub-02/anat/sub-02_T1w.nii.gz", "sub-02/ses-a/anat/sub-02_ses-a_run-1_T1w.nii")
    path = dataset(
        tmp_path, TABLE, (*images, *more, "sub-02/ses-a/anat/sub-02_ses-a_run-2_T1w.nii", "sub-02/ses-b/func/x")
    )
    (path / "sub-01" / "sub-01_sessions.tsv").write_text("session_id\tage\nses-a\t40\nses-b\tn/a\n")
    subjects = read_subjects(path)
    assert {name: subject.subject for name, subject in subjects.items()} == {
        "sub-01_ses-a": "sub-01",
        "sub-01_ses-b": "sub-01",
        "sub-02": "sub-02",
        "sub-02_ses-a": "sub-02",
    }
    assert [subject.require_images()[0].relative_to(path).as_posix() for subject in subjects.values()] == [
        *images,
        *more,
    ]
    assert [file.name for file in subjects["sub-02_ses-a"].others] == ["sub-02_ses-a_run-2_T1w.nii"]
    assert (subjects["sub-01_ses-a"].parse_age(), subjects["sub-02_ses-a"].parse_age()) == (40.0, 30.5)
    with pytest.raises(DataError, match="age is missing"):
        subjects["sub-01_ses-b"].parse_age()
    index = read_cohort(path)
    assert index.subjects == ("sub-01", "sub-01", "sub-02", "sub-02")
    data = SiteData("a", path, withdrawn=frozenset({"sub-01"}))
    assert data.select(subjects, lambda name: subjects[name].subject) == ("sub-02", "sub-02_ses-a")
