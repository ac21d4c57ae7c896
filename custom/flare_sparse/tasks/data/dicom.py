"""DICOM series of a site, converted to a BIDS data set in the site's cache; nothing of their headers leaves the site.

A folder of each subject contains its series, at any depth. Rules of the site file choose one series of each subject::

    data: pacs                                  # pacs/0815/..., pacs/participants.tsv, pacs/derivatives/...
    dicom:
      series: {Modality: MR, SeriesDescription: '*mprage*'}
      cache: /scratch/nifti
"""

import csv
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import Field

from ...core.errors import DataError
from ...core.settings import Settings
from .bids import TABLE, list_files

REPORT = "dicom_report.tsv"
_LOG = logging.getLogger(__name__)


class DicomRules(Settings):
    """How a site's DICOM series become images; an unknown field is an error."""

    cache: Path
    """folder of the converted images, relative to the site file"""
    series: dict[str, str] = Field(default_factory=dict)
    """patterns of header fields that choose one series of each subject, {SeriesDescription: '*mprage*'}"""
    suffix: str = Field("T1w", pattern=r"^[A-Za-z0-9]+$")
    """BIDS suffix of the images"""


@dataclass(frozen=True)
class Series:
    """The files of one series, and the header of the first."""

    files: tuple[Path, ...]
    header: Any

    def get_text(self, field: str) -> str:
        """Return a field of the header as text; empty where there is none."""
        return str(self.header.get(field, ""))

    def matches(self, patterns: Mapping[str, str]) -> bool:
        """Return whether all fields match their patterns, in upper or lower case."""
        return all(fnmatchcase(self.get_text(key).lower(), pattern.lower()) for key, pattern in patterns.items())


def convert_dicom(folder: Path, rules: DicomRules) -> Path:
    """Return a BIDS folder with an image of each subject, converted unless the cache has it.

    ``dicom_report.tsv`` in it names every series, what became of it and why. ``participants.tsv`` and ``derivatives``
    of ``folder`` are part of the BIDS folder.

    Args:
        folder: a folder for each subject.
        rules: choice of the series; ``cache`` is a path from the working directory.

    Raises:
        DataError: no series could be converted, two folders have the same identifier, or dicom2nifti is missing.
    """
    try:
        import dicom2nifti  # noqa: F401
    except ImportError as error:
        raise DataError("dicom: needs dicom2nifti: pip install 'flare-sparse[dicom]'") from error
    target = rules.cache / _compute_digest(folder, rules)
    if target.is_dir():
        return target
    # Written beside and renamed: another job of the site may convert at the same time.
    unfinished = target.with_name(f"{target.name}.part-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    rows = [
        row for name, own in _name_subjects(folder).items() for row in _convert_subject(own, name, rules, unfinished)
    ]
    _write_report(rows, unfinished / REPORT)
    if not (converted := sum(row["verdict"] == "converted" for row in rows)):
        raise DataError(f"{folder}: none of {len(rows)} DICOM series was converted; {unfinished / REPORT} says why")
    if (table := folder / TABLE).is_file():
        shutil.copy(table, unfinished)
    if (derivatives := folder / "derivatives").is_dir():
        (unfinished / "derivatives").symlink_to(derivatives.resolve())
    try:
        unfinished.rename(target)
    except OSError:
        shutil.rmtree(unfinished)
    _LOG.warning("%d of %d DICOM series were converted; %s says why", converted, len(rows), target / REPORT)
    return target


def _compute_digest(folder: Path, rules: DicomRules) -> str:
    """Return a digest of the rules and of the names, sizes and times of all files."""
    states = [(str(file.relative_to(folder)), file.stat()) for file in sorted(folder.rglob("*")) if file.is_file()]
    facts = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
    return sha256(json.dumps([rules.series, rules.suffix, facts]).encode()).hexdigest()[:16]


def _name_subjects(folder: Path) -> dict[str, Path]:
    """Return the folders of the subjects by BIDS identifier."""
    named: dict[str, Path] = {}
    for own in sorted(folder.glob("*/")):
        if own.name.startswith(".") or own.name == "derivatives":
            continue
        name = "sub-" + re.sub(r"[^A-Za-z0-9]", "", own.name.removeprefix("sub-"))
        if name in named:
            raise DataError(f"{folder}: {named[name].name} and {own.name} both become {name}; rename one")
        named[name] = own
    return named


def _convert_subject(folder: Path, name: str, rules: DicomRules, target: Path) -> list[dict[str, str]]:
    """Convert the chosen series of a subject and return a row of the report for each series."""
    found, unreadable = _read_series(folder)
    chosen = [series for series in found if series.matches(rules.series)]
    rows = []
    for series in found:
        if series not in chosen:
            reason = "does not match the rules"
        elif len(chosen) > 1:
            reason = f"{len(chosen)} series match; refine the rules"
        else:
            reason = _convert(series, unreadable, target / name / "anat" / f"{name}_{rules.suffix}.nii.gz")
        facts = {key: series.get_text(key) for key in ("SeriesNumber", "SeriesDescription")}
        verdict = "skipped" if reason else "converted"
        rows.append({"subject": name, **facts, "files": str(len(series.files)), "verdict": verdict, "reason": reason})
    return rows or [{"subject": name, "files": "0", "verdict": "skipped", "reason": "no DICOM file can be read"}]


def _read_series(folder: Path) -> tuple[list[Series], list[Path]]:
    """Return the series in a folder by number, and the files that are not DICOM."""
    from pydicom import dcmread

    members: dict[str, list[Path]] = {}
    headers: dict[str, Any] = {}
    unreadable = []
    for file in list_files(folder, "**/*"):
        if not file.is_file():
            continue
        try:
            header = dcmread(file, stop_before_pixels=True)
            uid = str(header.SeriesInstanceUID)
        # A damaged header can make pydicom raise any exception.
        except Exception:  # noqa: BLE001
            unreadable.append(file)
            continue
        headers.setdefault(uid, header)
        members.setdefault(uid, []).append(file)
    series = [Series(tuple(files), headers[uid]) for uid, files in members.items()]
    return sorted(series, key=lambda one: (len(one.get_text("SeriesNumber")), one.get_text("SeriesNumber"))), unreadable


def _convert(series: Series, unreadable: Sequence[Path], file: Path) -> str:
    """Write a series as NIfTI and return why that is not possible; empty: it is."""
    from dicom2nifti.convert_dicom import dicom_array_to_nifti
    from pydicom import dcmread

    # A damaged first or last slice would not be missed in the others.
    kinds = {(own.parent, own.suffix) for own in series.files}
    if lost := [own.name for own in unreadable if (own.parent, own.suffix) in kinds]:
        return f"{len(lost)} files beside it cannot be read, such as {lost[0]}"
    file.parent.mkdir(parents=True)
    try:
        dicom_array_to_nifti([dcmread(own) for own in series.files], str(file))
    except Exception as error:  # noqa: BLE001
        shutil.rmtree(file.parent.parent)
        return f"{type(error).__name__}: {error}"
    return ""


def _write_report(rows: Sequence[Mapping[str, str]], file: Path) -> None:
    columns = ("subject", "SeriesNumber", "SeriesDescription", "files", "verdict", "reason")
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, restval="", delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
