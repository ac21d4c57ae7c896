"""Tables with one row per subject: CSV (also ``.csv.gz``), Parquet or npz; each column becomes an array."""

from __future__ import annotations

import csv
import gzip
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ...core.errors import DataError, list_first, suggest
from ..task import Cohort

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})
Values = dict[str, Sequence[object] | np.ndarray]
"""Columns as a file has them; an array has float64 numbers, NaN where one is missing."""
DATES = (
    "it contains dates such as {date}. Compute a number from them in a column of its own, such as the age in years or "
    "the days since admission; a date itself mostly tells when a site took part"
)
"""What is wrong with a column of dates, and the remedy."""
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([ T].*)?|\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2})")


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    Attributes:
        source: file that the table was read from, named in errors.
        columns: arrays by name; float64 if every value is a number or missing (NaN), else text.
        marks: texts such as ``None`` that stand for missing values in columns of numbers, by column and row from 0.
    """

    source: Path
    columns: dict[str, np.ndarray]
    marks: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    def get_column(self, name: str) -> np.ndarray:
        """Return a column.

        Raises:
            DataError: there is no such column.
        """
        if name not in self.columns:
            names = list(self.columns)
            # A CSV file of a spreadsheet in a country with decimal commas.
            if len(names) == 1 and (found := [mark for mark in ";\t|" if mark in names[0]]):
                raise DataError(
                    f"{self.source}: one column, {names[0]!r}: the fields are separated by {found[0]!r}. Save the file "
                    "with commas between the fields and decimal points"
                )
            raise DataError(f"{self.source}: no column {name!r}.{suggest(name, names)} Found: {list_first(names)}")
        return self.columns[name]

    def get_numbers(self, name: str) -> np.ndarray:
        """Return a numeric column, float64; NaN where a value is missing.

        Raises:
            DataError: there is no such column, or it contains text.
        """
        column = self.get_column(name)
        if date := self.find_date(name):
            raise DataError(f"{self.source}: column {name!r} must have numbers, but {DATES.format(date=date)}")
        if column.dtype.kind != "f":
            row, text = next((row, text) for row, text in enumerate(column, start=1) if not is_number(str(text)))
            raise DataError(
                f"{self.source}: column {name!r} contains text such as {str(text)!r} (row {row}); expected numbers"
            )
        return column

    def get_texts(self, name: str) -> list[str]:
        """Return a column as text: whole numbers without a decimal point, missing values as the file spells them.

        Raises:
            DataError: there is no such column.
        """
        marks = self.marks.get(name, {})
        return [marks.get(row, format_identifier(value)) for row, value in enumerate(self.get_column(name).tolist())]

    def find_date(self, name: str) -> str:
        """Return the first value of a column of dates, such as ``2019-03-01``, ``1.3.19`` or 20190301; else ""."""
        column = self.get_column(name)
        if column.dtype.kind != "f":
            texts = [text for text in column.tolist() if text.lower() not in MISSING]
            return texts[0] if all(_DATE.fullmatch(text) for text in texts) else ""
        values = np.unique(column[np.isfinite(column)])
        years, months, days = values // 10_000, values // 100 % 100, values % 100
        are_dates = (years >= 1900) & (years < 2100) & (months >= 1) & (months <= 12) & (days >= 1) & (days <= 31)
        # A single value, or a constant, may be any number.
        return f"{values[0]:.0f}" if len(values) > 1 and bool((are_dates & (days % 1 == 0)).all()) else ""

    def mark_missing(self, codes: Mapping[str, Collection[str]]) -> Table:
        """Return the table without the values that stand for missing ones, by column: ``{"chol": {"0"}}``.

        Raises:
            DataError: there is no such column.
        """
        columns, marks = dict(self.columns), dict(self.marks)
        for name, own in codes.items():
            numbers = {_find_number(code) for code in own} - {None}
            texts = ["" if text in own or _find_number(text) in numbers else text for text in self.get_texts(name)]
            columns[name] = _to_array(texts)
            marks[name] = _find_marks(texts, columns[name])
        return replace(self, columns=columns, marks=marks)

    def get_ids(self, name: str) -> tuple[str, ...]:
        """Return the unique identifiers in a column.

        Raises:
            DataError: there is no such column, or an identifier occurs twice.
        """
        ids = tuple(format_identifier(value) for value in self.get_column(name))
        if len(set(ids)) < len(ids):
            duplicate = next(value for value in ids if ids.count(value) > 1)
            raise DataError(f"{self.source}: {name} {duplicate!r} occurs twice; remove one row")
        return ids

    def to_cohort(self, id_column: str) -> Cohort:
        """Return all columns, indexed by the identifiers in ``id_column``."""
        return Cohort(self.get_ids(id_column), self.columns)


def read_table(path: Path, columns: Collection[str] = ()) -> Table:
    """Read a table; the suffix selects the format: ``.csv``, ``.csv.gz``, ``.parquet`` or ``.npz``.

    Args:
        path: the file.
        columns: columns that are needed: of Parquet no others are read, if it has them all. Empty: all.

    Raises:
        DataError: the file is missing, of another format, or malformed.
    """
    reader = next((read for suffix, read in _READERS.items() if path.name.endswith(suffix)), None)
    if reader is None:
        raise DataError(f"{path}: expected a file that ends with one of {', '.join(_READERS)}")
    if not path.is_file():
        neighbours = [file.name for file in path.parent.glob("*")]
        raise DataError(f"{path}: there is no such file.{suggest(path.name, neighbours)}")
    try:
        values = _read_parquet(path, columns) if reader is _read_parquet else reader(path)
        arrays = {name: _to_array(column) for name, column in values.items()}
        marks = {name: _find_marks(column, arrays[name]) for name, column in values.items()}
    except DataError:
        raise
    # Whatever a damaged file makes the readers raise, from zlib.error to MemoryError for a damaged shape.
    except Exception as error:
        raise DataError(f"{path}: cannot be read as a table: {error}") from error
    if len({len(column) for column in arrays.values()}) > 1:
        raise DataError(f"{path}: columns differ in length; expected one value per subject in each")
    if not any(len(column) for column in arrays.values()):
        raise DataError(f"{path}: the table has no rows; expected one row per subject below the names of the columns")
    return Table(path, arrays, marks)


def read_header(path: Path) -> list[str]:
    """Return the names of a table's columns, in order; no row is read, except of a CSV file its first.

    Raises:
        DataError: the file is missing, of another format, or malformed.
    """
    try:
        if path.name.endswith(".npz"):
            return list(_read_npz(path))
        if path.name.endswith(".parquet"):
            return list(_import_parquet(path).read_schema(path).names)
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rt", newline="", encoding="utf-8-sig") as file:
            return next(csv.reader(file), [])
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: the names of its columns cannot be read: {error}") from error


def _read_csv(path: Path) -> Values:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return _parse_csv(file)


def _read_csv_gz(path: Path) -> Values:
    with gzip.open(path, "rt", newline="", encoding="utf-8-sig") as file:
        return _parse_csv(file)


def _parse_csv(file: TextIO) -> Values:
    header, *rows = list(csv.reader(file)) or [[]]
    if not header or len(set(header)) < len(header):
        raise ValueError("expected a first line with a different name for each column")
    # Editors and spreadsheets leave empty lines at the end.
    while rows and not rows[-1]:
        rows.pop()
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"line {number} has {len(row)} fields, the first line {len(header)}")
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def _read_parquet(path: Path, columns: Collection[str] = ()) -> Values:
    parquet = _import_parquet(path)
    from pyarrow import types

    known = parquet.read_schema(path).names
    # An error about a missing column names those that the table has.
    wanted = sorted(columns, key=known.index) if columns and set(columns) <= set(known) else None
    table = parquet.read_table(path, columns=wanted)
    values: Values = {}
    for name in table.column_names:
        column = table.column(name)
        # A number in Python takes three times as much memory, and as text six.
        is_numeric = types.is_integer(column.type) or types.is_floating(column.type)
        values[name] = column.cast("float64", safe=False).to_numpy() if is_numeric else column.to_pylist()
    return values


def _import_parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet needs pyarrow; pip install 'flare-sparse[parquet]', or convert the file to CSV"
        ) from error
    return parquet


def _read_npz(path: Path) -> Values:
    """Return the arrays with one value per row, and the columns ``codes_0``, ``codes_1``, ... of wider ones.

    Arrays of another length than most, such as the names of codes, are no columns.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if tensors := [name for name, values in arrays.items() if values.ndim not in (1, 2)]:
        raise ValueError(f"array {tensors[0]!r} has {arrays[tensors[0]].ndim} dimensions; expected 1 or 2")
    (rows, count), *others = Counter(len(values) for values in arrays.values()).most_common(2) or [(0, 0)]
    if others and others[0][1] == count:
        raise ValueError(f"arrays have {rows} and {others[0][0]} rows; expected the same number in most of them")
    columns: dict[str, np.ndarray] = {}
    for name, values in arrays.items():
        if len(values) == rows:
            columns |= {name: values} if values.ndim == 1 else {f"{name}_{i}": own for i, own in enumerate(values.T)}
    return {name: v.astype(np.float64) if v.dtype.kind in "biuf" else v.tolist() for name, v in columns.items()}


_READERS: dict[str, Callable[[Path], Values]] = {
    ".csv": _read_csv,
    ".csv.gz": _read_csv_gz,
    ".parquet": _read_parquet,
    ".npz": _read_npz,
}


def parse_number(text: str) -> float:
    """Return the number that a text spells with ASCII digits, as in other programs that read the file.

    Raises:
        ValueError: the text is no number. Python alone would also read ``1_000`` and full-width digits.

    >>> parse_number("1e3")
    1000.0
    """
    if "_" in text or not text.isascii():
        raise ValueError(f"{text!r} is no number")
    return float(text)


def _find_number(text: str) -> float | None:
    """Return the number that a text spells; None: it spells none."""
    try:
        return parse_number(text)
    except ValueError:
        return None


def is_number(text: str) -> bool:
    """Return whether a text is a number or marks a missing value."""
    return text.lower() in MISSING or _find_number(text) is not None


def _to_array(values: Sequence[object] | np.ndarray) -> np.ndarray:
    """Return float64 if every value is a number or missing, else text."""
    if isinstance(values, np.ndarray) and values.dtype == np.float64:
        return values
    texts = ["" if value is None else str(value).strip() for value in values]
    try:
        return np.array([np.nan if text.lower() in MISSING else parse_number(text) for text in texts], dtype=np.float64)
    except ValueError:
        return np.array(texts)


def _find_marks(values: Sequence[object] | np.ndarray, column: np.ndarray) -> dict[int, str]:
    """Return the texts that stand for missing values in a column of numbers, by row; none for a column of text."""
    if isinstance(values, np.ndarray):
        return {}
    rows = np.flatnonzero(np.isnan(column)).tolist() if column.dtype.kind == "f" else []
    return {row: text for row in rows if isinstance(value := values[row], str) and (text := value.strip())}


def format_identifier(value: object) -> str:
    """Return an identifier as text; whole numbers lose their decimal point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
