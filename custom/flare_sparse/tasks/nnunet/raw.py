"""nnU-Net's raw data layout, ``imagesTr``, ``labelsTr`` and ``dataset.json``, or BIDS with such a ``dataset.json``."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import nibabel as nib
import numpy as np
from nibabel.filebasedimages import ImageFileError
from pydantic import ConfigDict, Field, ValidationError, model_serializer, model_validator

from ...core.errors import DataError
from ...core.settings import Settings, explain
from ..data.bids import CaseFiles
from ..data.cases import find_bids_cases
from ..data.segmentation import check_volumes, describe_orientation
from ..task import ORIENTATION, Column

DATASET = "dataset.json"
TURNING_READER = "NibabelIOWithReorient"
"""nnU-Net's reader that turns images to RAS; all others read voxels as they are stored."""
_READER_SETTING = "overwrite_image_reader_writer"
_NIFTI = (".nii", ".nii.gz")


class Channels(Settings):
    """What a plan is for: the images and the labels of a case, as nnU-Net v2 names them."""

    model_config = ConfigDict(strict=True)

    channel_names: dict[str, str] = Field(min_length=1)
    """names by number, such as {"0": "CT"}"""
    labels: dict[str, int | list[int]]
    """values by name, among them {"background": 0}; several of a region"""
    file_ending: str = Field(pattern=r"^\.[A-Za-z0-9.]{1,15}$")
    """ending of the names of files, such as .nii.gz"""
    regions_class_order: list[int] | None = None
    """label of each region in predictions"""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if set(self.channel_names) != set(map(str, range(len(self.channel_names)))):
            raise ValueError('channel_names: expected names by number, such as {"0": "CT"}')
        if self.labels.get("background") != 0:
            raise ValueError('labels: expected values by name, among them {"background": 0}')
        if self.regions_class_order is None and any(isinstance(v, list) and len(v) > 1 for v in self.labels.values()):
            raise ValueError("labels: regions need regions_class_order")
        return self

    @model_serializer
    def _leave_out_empty(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}

    @property
    def suffixes(self) -> list[str]:
        """BIDS suffix of each channel's image, in order: the names of the channels."""
        return [self.channel_names[str(number)] for number in range(len(self.channel_names))]


class Dataset(Channels):
    """What all sites must share of ``dataset.json``."""

    overwrite_image_reader_writer: str | None = None
    """nnU-Net's class that reads the images; null: the first that reads one"""


def read_dataset(folder: Path) -> Dataset:
    """Return what all sites must share of ``dataset.json``: channels, labels, file ending; no case and no file name.

    Raises:
        DataError: the file is missing or malformed, or lists cases by their files.
    """
    file = folder / DATASET
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: expected the dataset.json of nnU-Net's raw data: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: expected a section, found {type(content).__name__}")
    if content.get("dataset"):
        raise DataError(
            f"{file}: dataset lists the files of each case, which is not read; name the files as in imagesTr and "
            "labelsTr, or as in BIDS, and remove the section"
        )
    try:
        return Dataset.model_validate({name: value for name, value in content.items() if name in Dataset.model_fields})
    except ValidationError as error:
        raise DataError(f"{file}: expected the sections of nnU-Net v2: {explain(error, Dataset)}") from error


def check_alignment(case: CaseFiles, reader: str, *, needs_labels: bool) -> None:
    """Check that the files of a case have the same voxels in the order in which nnU-Net reads them.

    Args:
        case: the case.
        reader: name of nnU-Net's class that reads the images.
        needs_labels: whether the label map is read, too.

    Raises:
        DataError: a file is missing or damaged, or lies elsewhere than the first one, or is stored in another
            orientation and read so.
    """
    files = (*case.images, case.require_labels()) if needs_labels else case.images
    if files[0].name.endswith(_NIFTI):
        remedy = f'set "{_READER_SETTING}": "{TURNING_READER}" in dataset.json at all sites, or reorient one file'
        check_volumes(files, canonical=reader == TURNING_READER, remedy=remedy)


def list_orientations(images: Sequence[Path]) -> list[Column]:
    """Return a column of the orientations in which NIfTI images are stored; none for other formats."""
    # The header alone; a file that cannot be read is an error when the case is.
    codes = []
    for file in images:
        with suppress(OSError, ValueError, ImageFileError):
            if file.name.endswith(_NIFTI):
                codes.append(describe_orientation(nib.load(file)))
    return [Column("orientation", ORIENTATION, 0, np.zeros(0), Counter(codes))] if codes else []


def explain_reader_error(error: Exception) -> str:
    """Return the text of an error of nnU-Net's readers, with the setting that mends it."""
    if "orthonormal" not in str(error):
        return str(error)
    return (
        "the axes of the image are not at right angles, which SimpleITK refuses; set "
        f'"{_READER_SETTING}": "NibabelIO" in dataset.json at all sites, and compute all fingerprints again'
    )


def note_missing_channels(case: CaseFiles, wanted: int) -> CaseFiles:
    """Return a case, with its problem if it has another number of images than the data set has channels."""
    if len(case.images) == wanted or case.problem:
        return case
    return replace(case, problem=f"{len(case.images)} images; dataset.json names {wanted} channels")


def find_raw_cases(folder: Path, derivative: str = "*") -> dict[str, CaseFiles]:
    """Return the training cases of a raw data set, in name order: one image for each channel, and a label map.

    In BIDS, the names of the channels are the suffixes of the images, and a session is a case of its subject.

    Args:
        folder: folder of the data.
        derivative: in BIDS, folder of the label maps in ``derivatives``; ``*`` is any text.

    Raises:
        DataError: there is no such data set, or it has no cases.
    """
    dataset = read_dataset(folder)
    if not (folder / "imagesTr").is_dir():
        cases = find_bids_cases(folder, dataset.suffixes, derivative)
    else:
        images = find_channels(folder / "imagesTr", dataset.file_ending)
        labels = {name: folder / "labelsTr" / f"{name}{dataset.file_ending}" for name in images}
        cases = {
            name: CaseFiles(files, labels[name] if labels[name].is_file() else None, subject=name)
            for name, files in images.items()
        }
    if not cases:
        raise DataError(
            f"{folder}: no cases imagesTr/CASE_0000{dataset.file_ending}, and none in BIDS: sub-*/anat/*_"
            f"{dataset.suffixes[0]}{dataset.file_ending}"
        )
    wanted = len(dataset.channel_names)
    return {name: note_missing_channels(case, wanted) for name, case in sorted(cases.items())}


def find_channels(folder: Path, file_ending: str) -> dict[str, tuple[Path, ...]]:
    """Return the images of each case of a folder, channel by channel: ``CASE_0000``, ``CASE_0001``, ...

    Raises:
        DataError: a case lacks a channel below its last one.
    """
    pattern = re.compile(rf"(?P<case>.+)_(?P<channel>\d{{4}}){re.escape(file_ending)}")
    cases: dict[str, tuple[Path, ...]] = {}
    for file in sorted(folder.glob(f"*{file_ending}")):
        if match := pattern.fullmatch(file.name):
            images = cases.get(match["case"], ())
            if int(match["channel"]) != len(images):
                raise DataError(f"{file}: {match['case']} lacks {match['case']}_{len(images):04d}{file_ending}")
            cases[match["case"]] = (*images, file)
    return cases
