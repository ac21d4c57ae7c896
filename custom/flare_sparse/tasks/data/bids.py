"""Files of a case, and BIDS data sets: ``participants.tsv`` and ``sub-*/[ses-*/]anat/*_T1w.nii.gz``.

A session is an example of its subject, ``sub-x_ses-y``; cells of ``sub-x/sub-x_sessions.tsv`` replace those of the
subject, such as the age at the session. A path names one BIDS folder, or a folder of several. In the second case
identifiers are ``FOLDER/sub-x``, and the natural site of a subject is its folder.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from ...core.errors import DataError, list_first
from ...core.names import describe_absent, find_number
from ..task import Cohort
from .table_files import read_columns
from .tables import MISSING

TABLE, PARTICIPANT = "participants.tsv", "participant_id"
NO_ROW = f"folders have no row in {TABLE}"
DERIVATIVES = "derivatives"
DerivativeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9*_-][A-Za-z0-9*_.-]*$")]
"""Name of a folder in ``derivatives/``; it comes with a job, and must not lead out of the data."""
SEX_VALUES = "F or 0 (female), M or 1 (male)"
_SEX = {"f": 0.0, "female": 0.0, "0": 0.0, "m": 1.0, "male": 1.0, "1": 1.0}
_LABEL, _SESSION = re.compile(r"sub-[A-Za-z0-9]+"), re.compile(r"ses-[A-Za-z0-9]+")


@dataclass(frozen=True)
class CaseFiles:
    """Files of one case: of a subject, or of one of its sessions.

    Attributes:
        images: one image for each channel, or one image with all of them.
        labels: label map; None: there is none.
        row: the case's row in ``participants.tsv`` and its ``site``, if the data has them.
        subject: identifier of the subject; cases of one subject are in the same part of a split.
        problem: why the images are no case; empty if they are.
        label_problem: why there is not one label map; empty if there is, or none.
        others: further runs of the image, which are not used.
    """

    images: tuple[Path, ...]
    labels: Path | None = None
    row: Mapping[str, str] = field(default_factory=dict)
    subject: str = ""
    problem: str = ""
    label_problem: str = ""
    others: tuple[Path, ...] = ()

    def require_images(self) -> tuple[Path, ...]:
        """Return the images.

        Raises:
            DataError: they are no case.
        """
        if self.problem:
            raise DataError(self.problem)
        return self.images

    def require_labels(self) -> Path:
        """Return the label map.

        Raises:
            DataError: there is not one file of each kind.
        """
        if problem := self.problem or self.label_problem:
            raise DataError(problem)
        if self.labels is None:
            raise DataError("missing file: there is no label map")
        return self.labels

    @property
    def is_listed(self) -> bool:
        """Whether the subject has a row."""
        return PARTICIPANT in self.row

    def get_text(self, column: str) -> str:
        """Return the text of a column.

        Raises:
            DataError: the subject has no row, or the column is absent or empty.
        """
        if not self.is_listed:
            raise DataError(f"unknown participant: it has no row in {TABLE}")
        if column not in self.row:
            raise DataError(f"{TABLE} has {describe_absent(column, self.row)}")
        value = self.row[column]
        if value.lower() in MISSING:
            raise DataError(f"{column} is missing in {TABLE}")
        return value

    def parse_age(self) -> float:
        """Return the age in years.

        Raises:
            DataError: the age is missing, not a number, or outside 0 to 120.
        """
        text = self.get_text("age")
        years = find_number(text)
        if years is None or not 0 <= years <= 120:
            raise DataError(f"age {text!r} in {TABLE}; expected years, 0 to 120")
        return years

    def parse_sex(self) -> float:
        """Return 1 for male, 0 for female.

        Raises:
            DataError: the sex is missing or none of ``SEX_VALUES``.
        """
        text = self.get_text("sex")
        if (sex := _SEX.get(text.strip().lower())) is None:
            raise DataError(f"sex {text!r} in {TABLE}; expected {SEX_VALUES}")
        return sex


def read_subjects(path: Path, derivative: str | None = None) -> dict[str, CaseFiles]:
    """Read all subjects of one BIDS folder, or of all BIDS folders inside ``path``.

    Args:
        path: the folder.
        derivative: folder in ``derivatives/`` whose images are read; None: those of the data set itself.

    Returns:
        Subjects by identifier, in name order.

    Raises:
        DataError: there is no BIDS data set, or a ``participants.tsv`` is malformed.
    """
    expected = f"expected {TABLE} and sub-*/anat/*_T1w.nii.gz in this folder or its subfolders"
    find = partial(_read_dataset, derivative=derivative)
    return find_everywhere(path, find, f"{path}: no BIDS data set; {expected}")


def find_everywhere(path: Path, find: Callable[[Path], dict[str, CaseFiles]], message: str) -> dict[str, CaseFiles]:
    """Return what ``find`` finds in a folder, or else in the folders in it, which are sites then.

    Raises:
        DataError: there is nothing.
    """
    if cases := find(path):
        return cases
    folders = sorted(folder for folder in path.glob("*/") if not folder.name.startswith(".")) if path.is_dir() else []
    found = {folder: find(folder) for folder in folders}
    several = {
        f"{folder.name}/{name}": replace(
            case, row={**case.row, "site": folder.name}, subject=f"{folder.name}/{case.subject}"
        )
        for folder, cases in found.items()
        for name, case in cases.items()
    }
    if not several:
        raise DataError(message)
    return several


def index_cases(cases: Mapping[str, CaseFiles]) -> Cohort:
    """Return the index of cases, with the columns of ``participants.tsv``, all as text, if there is one."""
    names = dict.fromkeys(column for case in cases.values() for column in case.row)
    columns = {name: np.array([case.row.get(name, "") for case in cases.values()]) for name in names}
    subjects = tuple(case.subject for case in cases.values())
    return Cohort(tuple(cases), columns, () if subjects == tuple(cases) else subjects)


def read_cohort(path: Path, derivative: str | None = None) -> Cohort:
    """Return the subjects that have a row, with all columns of ``participants.tsv``.

    Arguments are those of :func:`read_subjects`. The column ``age`` is numeric, NaN where missing; all others are text.

    Raises:
        DataError: as :func:`read_subjects`.
    """
    subjects = read_subjects(path, derivative)
    cohort = index_cases({name: files for name, files in subjects.items() if files.is_listed})
    if (texts := cohort.columns.get("age")) is not None:
        ages = [find_number(text) for text in texts.tolist()]
        cohort.columns["age"] = np.array([math.nan if age is None else age for age in ages])
    return cohort


def _read_dataset(folder: Path, derivative: str | None) -> dict[str, CaseFiles]:
    if not (folder / TABLE).is_file():
        return {}
    rows, root = read_rows(folder / TABLE), folder if derivative is None else _find_derivative(folder, derivative)
    on_disk = {entry.name for entry in root.glob("sub-*/")}
    subjects = {}
    for name in sorted(on_disk | set(rows)):
        sessions = _read_sessions(folder / name, root / name)
        found = {"": list_volumes(root / name)} | {session: list_volumes(root / name / session) for session in sessions}
        used = {session: images for session, images in found.items() if images} or {"": []}
        for session, images in used.items():
            row = {**rows[name], **sessions.get(session, {})} if name in rows else {}
            problem = "" if images else _describe_missing(folder, name)
            subjects[f"{name}_{session}".removesuffix("_")] = CaseFiles(
                tuple(images[:1]), None, row, name, problem, others=tuple(images[1:])
            )
    return subjects


def _find_derivative(folder: Path, name: str) -> Path:
    """Return the one folder in ``derivatives/`` of a name, in which ``*`` is any text."""
    found = sorted(folder.glob(f"{DERIVATIVES}/{name}/"))
    if len(found) != 1:
        have = list_first([each.name for each in (found or sorted(folder.glob(f"{DERIVATIVES}/*/")))]) or "none"
        raise DataError(
            f"task.derivative: {len(found)} folders {DERIVATIVES}/{name} in {folder}; expected 1, found {have}"
        )
    return found[0]


def _describe_missing(folder: Path, subject: str) -> str:
    """Return that a subject has no image, and which folder in ``derivatives/`` has one."""
    places = (
        place.name
        for place in sorted(folder.glob(f"{DERIVATIVES}/*/"))
        if any(list_volumes(inner) for inner in (place / subject, *place.glob(f"{subject}/ses-*/")))
    )
    elsewhere = next(places, None)
    hint = f"; {DERIVATIVES}/{elsewhere} has one: set task.derivative" if elsewhere else ""
    return f"missing file: no anat/*_T1w.nii.gz, and none in a folder ses-*{hint}"


def _read_sessions(folder: Path, images: Path) -> dict[str, dict[str, str]]:
    """Return the cells that a subject's own table gives by session, for each session with a folder of images."""
    table = folder / f"{folder.name}_sessions.tsv"
    rows = read_rows(table, "session_id", _SESSION) if table.is_file() else {}
    cells = {
        name: {key: cell for key, cell in row.items() if key != "session_id" and cell} for name, row in rows.items()
    }
    return {place.name: cells.get(place.name, {}) for place in sorted(images.glob("ses-*/"))}


def list_volumes(folder: Path, pattern: str = "anat/*_T1w") -> list[Path]:
    """Return the NIfTI files of a folder whose names match a pattern up to their end, the compressed ones first.

    Hidden ones are left out: macOS writes a ``._NAME`` without voxels beside each file that it copies.
    """
    ends = (".nii.gz", ".nii")
    return [file for end in ends for file in sorted(folder.glob(f"{pattern}{end}")) if not file.name.startswith(".")]


def read_rows(table: Path, column: str = PARTICIPANT, pattern: re.Pattern[str] = _LABEL) -> dict[str, dict[str, str]]:
    """Return the rows of ``participants.tsv``, or of a table of sessions, by label, with empty texts for ``n/a``.

    Labels become folder names below the data set, so ``../x`` must not pass: ids that are not plain BIDS labels are
    refused.
    """
    columns = read_columns(table, is_bids=True)
    if columns and column not in columns:
        raise DataError(f"{table}: {describe_absent(column, columns)}")
    rows: dict[str, dict[str, str]] = {}
    for number, cells in enumerate(zip(*columns.values(), strict=True), start=2):
        if not any(cells):
            continue
        row = dict(zip(columns, map(str, cells), strict=True))
        name = row[column]
        if not pattern.fullmatch(name):
            start = pattern.pattern.partition("-")[0]
            raise DataError(f"{table}, line {number}: {column} {name!r}; expected {start}- and letters or digits")
        if name in rows:
            raise DataError(f"{table}, line {number}: {name} occurs twice; remove one row")
        rows[name] = {column: "" if cell == "n/a" else cell for column, cell in row.items()}
    return rows
