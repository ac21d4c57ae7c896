"""Hospital admissions: an outcome and a row of medication codes for each stay, from a table or from arrays.

* a table (``.csv``, ``.csv.gz``, ``.parquet``): one row a stay; the medications are the columns that begin with a prefix;
* arrays (``.npz``): the medications are one array ``(stays, medications)``, everything else one value a stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from ..errors import DataError, suggest
from ..task import Cohort
from .tables import identifier, read_table


@dataclass(frozen=True)
class Wanted:
    """Which columns or arrays to read.

    Attributes:
        outcome: 1 for died, 0 for survived; anything else is not known and the stay is left out.
        medications: array, or prefix of the columns before an underscore.
        stay: identifiers; None: the number of the row.
        patient: whose stay it is; None: every stay is a patient of its own.
        only: keep the rows where this is 1; None: all.
    """

    outcome: str
    medications: str
    stay: str | None
    patient: str | None
    only: str | None


@dataclass(frozen=True)
class Admissions:
    """Stays with a known outcome.

    Attributes:
        ids: identifiers, unique.
        patients: whose stay each is.
        died: bool ``(n,)``.
        codes: uint8 ``(n, medications)`` as in the source: 0 for not given.
        columns: everything else that has one value a stay; text that is empty is ``unknown``.
    """

    ids: tuple[str, ...]
    patients: tuple[str, ...]
    died: np.ndarray
    codes: np.ndarray
    columns: dict[str, np.ndarray]

    @property
    def cohort(self) -> Cohort:
        """For the simulator's partitioners."""
        return Cohort(self.ids, self.columns)


def read_admissions(path: Path, wanted: Wanted) -> Admissions:
    """The stays of a file.

    Raises:
        DataError: the file or a column is missing, malformed, or of another length; an identifier is there twice; no
            stay has a known outcome.
    """
    columns, codes = _arrays(path, wanted) if path.suffix == ".npz" else _table(path, wanted)
    outcome = _numbers(columns, wanted.outcome, path)
    keep = np.isin(outcome, (0, 1))
    if wanted.only is not None:
        keep &= _numbers(columns, wanted.only, path) == 1
    rows = np.flatnonzero(keep)
    if not rows.size:
        raise DataError(f"{path}: none of {len(keep)} stays is left; {wanted.outcome} must be 1 or 0")
    numbers = np.arange(len(keep))
    stays = numbers if wanted.stay is None else _column(columns, wanted.stay, path)
    ids = tuple(identifier(stays[row]) for row in rows)
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        twice = next(name for name in ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DataError(f"{path}: {wanted.stay} {twice!r} is there twice; remove one row")
    patients = stays if wanted.patient is None else _column(columns, wanted.patient, path)
    return Admissions(
        ids,
        tuple(identifier(patients[row]) for row in rows),
        outcome[rows] == 1,
        codes[rows],
        {name: _named(values[rows]) for name, values in columns.items()},
    )


def _arrays(path: Path, wanted: Wanted) -> tuple[dict[str, np.ndarray], np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile, EOFError) as error:
        raise DataError(f"{path}: cannot be read as arrays: {error}") from error
    codes = _column(arrays, wanted.medications, path)
    if codes.ndim != 2:
        raise DataError(f"{path}: {wanted.medications} has shape {codes.shape}; expected (stays, medications)")
    return {name: a for name, a in arrays.items() if a.shape == (len(codes),)}, _codes(codes, path)


def _table(path: Path, wanted: Wanted) -> tuple[dict[str, np.ndarray], np.ndarray]:
    columns, prefix = read_table(path).columns, f"{wanted.medications}_"
    names = sorted(name for name in columns if name.startswith(prefix))
    if not names:
        raise DataError(f"{path}: no column begins with {prefix!r}; the medications are expected there")
    codes = np.stack([_numbers(columns, name, path) for name in names], axis=1)
    return {name: values for name, values in columns.items() if name not in names}, _codes(codes, path)


def _codes(values: np.ndarray, path: Path) -> np.ndarray:
    whole = values.dtype.kind in "biu" or (
        values.dtype.kind == "f" and bool(np.isfinite(values).all()) and bool((values == np.floor(values)).all())
    )
    if not whole or (values.size and (values.min() < 0 or values.max() > 255)):
        raise DataError(f"{path}: medications must be whole numbers from 0 (not given) to 255")
    return values.astype(np.uint8)


def _column(columns: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    if name not in columns:
        hint = suggest(name, columns)
        raise DataError(f"{path}: there is no {name!r}.{hint} Found: {', '.join(sorted(columns)[:12])}")
    return columns[name]


def _numbers(columns: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    values = _column(columns, name, path)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{path}: {name!r} holds text such as {str(values[0])!r}; expected numbers")
    return values.astype(np.float64)


def _named(values: np.ndarray) -> np.ndarray:
    return np.where(values == "", "unknown", values) if values.dtype.kind == "U" else values
