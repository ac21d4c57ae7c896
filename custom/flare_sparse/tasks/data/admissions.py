"""Hospital admissions: the outcome and the medication codes of each stay, read from a table or from arrays.

* Table (``.csv``, ``.csv.gz``, ``.parquet``): one row per stay; medications are the columns with a common prefix.
* Arrays (``.npz``): medications are one array ``(stays, medications)``; every other array has one value per stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.errors import DataError, suggest
from ..task import Cohort
from .tables import format_identifier, read_table


@dataclass(frozen=True)
class AdmissionColumns:
    """Names of the columns or arrays to read.

    Attributes:
        outcome: 1 for died, 0 for survived; stays with any other value are dropped.
        medications: name of the array, or prefix (before an underscore) of the table's columns.
        stay: identifiers of the stays; None: row numbers.
        patient: identifiers of the patients; None: each stay is a different patient.
        include: keep only the rows where this column is 1; None: keep all.
    """

    outcome: str
    medications: str
    stay: str | None
    patient: str | None
    include: str | None


@dataclass(frozen=True)
class Admissions:
    """Stays with a known outcome.

    Attributes:
        ids: unique identifiers of the stays.
        patients: patient identifier of each stay.
        died: bool ``(n,)``.
        codes: uint8 ``(n, medications)`` as stored in the source; 0: not given.
        columns: every other column with one value per stay; empty text reads ``unknown``.
    """

    ids: tuple[str, ...]
    patients: tuple[str, ...]
    died: np.ndarray
    codes: np.ndarray
    columns: dict[str, np.ndarray]

    @property
    def cohort(self) -> Cohort:
        """The index that the simulator's partitioners read."""
        return Cohort(self.ids, self.columns)


def read_admissions(path: Path, names: AdmissionColumns) -> Admissions:
    """Read the stays with a known outcome from a file.

    Raises:
        DataError: the file or a column is missing, malformed or of the wrong length; an identifier occurs twice; no
            stay has a known outcome.
    """
    columns, codes = _read_arrays(path, names) if path.suffix == ".npz" else _read_table(path, names)
    outcome = _get_numbers(columns, names.outcome, path)
    keep = np.isin(outcome, (0, 1))
    if names.include is not None:
        keep &= _get_numbers(columns, names.include, path) == 1
    rows = np.flatnonzero(keep)
    if not rows.size:
        raise DataError(f"{path}: none of {len(keep)} stays can be used; {names.outcome} must be 1 or 0")
    row_numbers = np.arange(len(keep))
    stays = row_numbers if names.stay is None else _get_column(columns, names.stay, path)
    ids = tuple(format_identifier(stays[row]) for row in rows)
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        duplicate = next(name for name in ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DataError(f"{path}: {names.stay} {duplicate!r} occurs twice; remove one row")
    patients = stays if names.patient is None else _get_column(columns, names.patient, path)
    return Admissions(
        ids,
        tuple(format_identifier(patients[row]) for row in rows),
        outcome[rows] == 1,
        codes[rows],
        {name: _fill_empty(values[rows]) for name, values in columns.items()},
    )


def _read_arrays(path: Path, names: AdmissionColumns) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the one-dimensional arrays of an npz file by name, and the medication codes."""
    try:
        # Opened here, because NumPy leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    # Whatever a damaged archive makes NumPy and zlib raise, from zlib.error to MemoryError for a damaged shape.
    except Exception as error:
        raise DataError(f"{path}: cannot be read as arrays: {type(error).__name__}: {error}") from error
    codes = _get_column(arrays, names.medications, path)
    if codes.ndim != 2:
        raise DataError(f"{path}: {names.medications} has shape {codes.shape}; expected (stays, medications)")
    return {name: a for name, a in arrays.items() if a.shape == (len(codes),)}, _to_uint8(codes, path)


def _read_table(path: Path, names: AdmissionColumns) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the columns of a table by name without the medications, and the medication codes."""
    columns, prefix = read_table(path).columns, f"{names.medications}_"
    medications = sorted(name for name in columns if name.startswith(prefix))
    if not medications:
        raise DataError(f"{path}: no column begins with {prefix!r}; the medication columns must have this prefix")
    codes = np.stack([_get_numbers(columns, name, path) for name in medications], axis=1)
    others = {name: values for name, values in columns.items() if name not in medications}
    return others, _to_uint8(codes, path)


def _to_uint8(values: np.ndarray, path: Path) -> np.ndarray:
    is_integral = values.dtype.kind in "biu" or (
        values.dtype.kind == "f" and bool(np.isfinite(values).all()) and bool((values == np.floor(values)).all())
    )
    if not is_integral or (values.size and (values.min() < 0 or values.max() > 255)):
        raise DataError(f"{path}: medications must be whole numbers from 0 (not given) to 255")
    return values.astype(np.uint8)


def _get_column(columns: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    if name not in columns:
        hint = suggest(name, columns)
        raise DataError(f"{path}: there is no {name!r}.{hint} Found: {', '.join(sorted(columns)[:12])}")
    return columns[name]


def _get_numbers(columns: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    values = _get_column(columns, name, path)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{path}: {name!r} contains text such as {str(values[0])!r}; expected numbers")
    return values.astype(np.float64)


def _fill_empty(values: np.ndarray) -> np.ndarray:
    return np.where(values == "", "unknown", values) if values.dtype.kind == "U" else values
