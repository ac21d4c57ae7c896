"""DICOM series at a site: one of each subject becomes an image, and a report says why the others do not."""

from __future__ import annotations

import csv
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage, generate_uid

from flare_sparse.core.errors import DataError
from flare_sparse.tasks.data.bids import read_subjects
from flare_sparse.tasks.data.dicom import REPORT, DicomRules, convert_dicom
from flare_sparse.tasks.data.source import find_site_data

NAME = "Lovelace^Ada"
SLICES = 6


def write_series(folder: Path, number: int, description: str, voxels: np.ndarray) -> list[Path]:
    """Write axial slices of 2 x 1 x 3 mm, ``voxels (slices, rows, columns)``, and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    uid, files = generate_uid(entropy_srcs=[str(folder), str(number)]), []
    for index, plane in enumerate(voxels):
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID = MRImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[uid, str(index)])
        data = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
        data.PatientName, data.PatientID, data.Modality = NAME, "0815", "MR"
        data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
        data.SeriesInstanceUID, data.StudyInstanceUID = uid, generate_uid(entropy_srcs=["study"])
        data.SeriesNumber, data.SeriesDescription, data.InstanceNumber = number, description, index + 1
        data.ImageType, data.Manufacturer = ["ORIGINAL", "PRIMARY"], "none"
        data.ImagePositionPatient = [0.0, 0.0, 3.0 * index]
        data.ImageOrientationPatient = [1.0, 0, 0, 0, 1, 0]
        data.PixelSpacing, data.SliceThickness = [1.0, 2.0], 3.0
        data.Rows, data.Columns = plane.shape
        data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
        data.BitsAllocated = data.BitsStored = 16
        data.HighBit, data.PixelRepresentation = 15, 0
        data.PixelData = plane.astype("<u2").tobytes()
        files.append(folder / f"{number:02d}-{index:03d}.dcm")
        data.save_as(files[-1], enforce_file_format=True)
    return files


def draw_voxels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, (SLICES, 8, 10))


def read_report(folder: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Return verdict and reason by subject and number of the series."""
    with (folder / REPORT).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    return {(row["subject"], row["SeriesNumber"]): (row["verdict"], row["reason"]) for row in rows}


@pytest.fixture
def pacs(tmp_path: Path) -> Path:
    """A subject with a scout and a T1w series, and one whose T1w series has a damaged last slice."""
    folder = tmp_path / "pacs"
    write_series(folder / "08-15" / "a", 1, "scout", draw_voxels(0))
    write_series(folder / "08-15" / "b", 2, "t1_MPRAGE_sag", draw_voxels(1))
    damaged = write_series(folder / "4711", 2, "t1_mprage_sag", draw_voxels(2))
    damaged[-1].write_bytes(damaged[-1].read_bytes()[:300])
    (folder / "participants.tsv").write_text("participant_id\tage\nsub-0815\t41\nsub-4711\t50\n")
    (tmp_path / "site.yaml").write_text(
        "data: pacs\ndicom: {series: {Modality: MR, SeriesDescription: '*mprage*'}, cache: nifti}\n"
    )
    return folder


@pytest.mark.slow
def test_site_file_names_series_that_become_a_bids_data_set(pacs: Path) -> None:
    located = find_site_data("A", None, {"FLARE_SPARSE_SITE_FILE": str(pacs.parent / "site.yaml")})
    assert located.path.parent == pacs.parent / "nifti"
    subjects = read_subjects(located.path)
    assert subjects["sub-0815"].parse_age() == 41
    assert subjects["sub-4711"].image is None
    image = nib.load(subjects["sub-0815"].get_image())
    assert nib.affines.voxel_sizes(image.affine) == pytest.approx([2, 1, 3])
    # DICOM's axes point to the left and the back, NIfTI's to the right and the front.
    voxels = nib.as_closest_canonical(image).get_fdata()
    assert np.array_equal(voxels, draw_voxels(1).transpose(2, 1, 0)[::-1, ::-1])
    content = image.header.binaryblock + b"".join(bytes(e.get_content()) for e in image.header.extensions)
    assert not any(word in content for word in (b"Lovelace", b"0815", b"MPRAGE"))

    report = read_report(located.path)
    assert report[("sub-0815", "1")] == ("skipped", "does not match the rules")
    assert report[("sub-0815", "2")] == ("converted", "")
    verdict, reason = report[("sub-4711", "2")]
    assert verdict == "skipped"
    assert reason == "1 files beside it cannot be read, such as 02-005.dcm"
    # The report is for the site: no name of a patient is in it.
    assert NAME not in (located.path / REPORT).read_text()


@pytest.mark.slow
def test_cache_is_used_until_files_or_rules_change(pacs: Path) -> None:
    rules = DicomRules(cache=pacs.parent / "nifti", series={"SeriesNumber": "2"})
    first = convert_dicom(pacs, rules)
    (marked := first / "mark").touch()
    assert convert_dicom(pacs, rules) == first
    assert marked.exists()
    write_series(pacs / "4711", 2, "t1_mprage_sag", draw_voxels(2))
    repaired = convert_dicom(pacs, rules)
    assert repaired != first
    assert read_report(repaired)[("sub-4711", "2")] == ("converted", "")
    assert not list(rules.cache.glob("*.part*"))


def test_missing_slice_and_several_matches_are_reported(pacs: Path) -> None:
    (pacs / "08-15" / "b" / "02-003.dcm").unlink()
    write_series(pacs / "4711", 2, "t1_mprage_sag", draw_voxels(2))
    write_series(pacs / "4711" / "again", 7, "t1_mprage_sag", draw_voxels(3))
    rules = DicomRules(cache=pacs.parent / "nifti", series={"SeriesDescription": "*mprage*"})
    with pytest.raises(DataError, match="none of 4 DICOM series was converted") as caught:
        convert_dicom(pacs, rules)
    (folder,) = rules.cache.iterdir()
    assert str(folder / REPORT) in str(caught.value)
    report = read_report(folder)
    assert report[("sub-0815", "2")] == ("skipped", "ConversionValidationError: SLICE_INCREMENT_INCONSISTENT")
    assert report[("sub-4711", "7")] == ("skipped", "2 series match; refine the rules")


def test_two_folders_of_one_identifier_are_refused(pacs: Path) -> None:
    (pacs / "0815").mkdir()
    with pytest.raises(DataError, match="08-15 and 0815 both become sub-0815"):
        convert_dicom(pacs, DicomRules(cache=pacs.parent / "nifti"))
