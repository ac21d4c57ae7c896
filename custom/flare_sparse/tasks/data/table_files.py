"""Files of tables: CSV and TSV, xlsx, Parquet, SQLite and npz, each as columns of text or of stored numbers."""

import csv
import gzip
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np

from ...core.errors import DataError, list_first, require_extra, suggest
from ...core.names import clean_name, decode_text, format_name

DELIMITERS = ",;\t|"
Columns = dict[str, np.ndarray]
"""Columns as a file has them: text, or numbers where it stores them as numbers."""
_TEXT = np.dtypes.StringDType()


def read_columns(path: Path, columns: Collection[str] = (), *, is_bids: bool = False) -> Columns:
    """Read the columns of a table; the end of the file's name selects the format.

    Args:
        path: the file.
        columns: columns that are needed: of Parquet no others are read, if it has them all. Empty: all.
        is_bids: whether it is a table of BIDS, which has no quoting and may have no rows.

    Raises:
        DataError: the file is missing, of another format, or malformed.
    """
    values = _read(path, columns, is_bids=is_bids)
    if len({len(column) for column in values.values()}) > 1:
        raise DataError(f"{path}: columns differ in length; expected one value per subject in each")
    if not is_bids and not any(len(column) for column in values.values()):
        raise DataError(f"{path}: the table has no rows; expected one row per subject below the names of the columns")
    return values


def read_header(path: Path) -> list[str]:
    """Return the names of a table's columns, in order; it may have no rows, and no row of a Parquet file is read.

    Raises:
        DataError: the file is missing, of another format, or malformed.
    """
    return list(_read(path, (), header_only=True))


def _read(path: Path, columns: Collection[str], *, header_only: bool = False, is_bids: bool = False) -> Columns:
    reader = next((read for suffix, read in _READERS.items() if path.name.lower().endswith(suffix)), None)
    if reader is None:
        raise DataError(f"{path}: expected a file that ends with one of {', '.join(_READERS)}")
    if not path.is_file():
        neighbours = [file.name for file in path.parent.glob("*")]
        raise DataError(f"{path}: there is no such file.{suggest(path.name, neighbours)}")
    try:
        if reader is _read_parquet:
            return _read_parquet(path, columns, header_only=header_only)
        return _read_bids(path) if is_bids else reader(path)
    except DataError:
        raise
    # Whatever a damaged file makes the readers raise, from zlib.error to MemoryError for a damaged shape.
    except Exception as error:
        raise DataError(f"{path}: cannot be read as a table: {error}") from error


def _read_csv(path: Path) -> Columns:
    """Read fields separated by the mark that divides the first two lines alike: ``,``, ``;``, a tab or ``|``."""
    text = _read_text(path)
    if text[:4].lower() == "sep=":
        raise ValueError("the first line, sep=, is meant for Excel alone; remove it")
    # strict: a quote without its partner would take the lines up to the next one into its field.
    delimiter = _find_delimiter(text, default="\t" if ".tsv" in path.name.lower() else ",")
    return _build_columns(list(csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)))


def _read_bids(path: Path) -> Columns:
    """Read fields separated by tabs, in which a quotation mark is a mark like others; blank lines are empty rows."""
    lines = list(csv.reader(StringIO(_read_text(path), newline=""), delimiter="\t", quoting=csv.QUOTE_NONE))
    return _build_columns([line or [""] * len(lines[0]) for line in lines]) if any(lines) else {}


def _read_text(path: Path) -> str:
    content = gzip.decompress(path.read_bytes()) if path.name.lower().endswith(".gz") else path.read_bytes()
    try:
        return decode_text(content)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(
            f"line {line} is not in UTF-8 ({error.reason}: byte {content[error.start]:#x}); save the file as UTF-8, in "
            "a spreadsheet as 'CSV UTF-8'"
        ) from error


def _find_delimiter(text: str, default: str) -> str:
    """Return the mark that divides the first two lines into the most fields, the same number of each, or a default.

    A tab that is the default needs only divide them: texts in a file of tabs may have more commas than it has columns.
    """
    counts = {}
    for mark in DELIMITERS:
        try:
            lines = [
                line for line, _ in zip(csv.reader(StringIO(text, newline=""), delimiter=mark), "12", strict=False)
            ]
        except csv.Error:
            continue
        counts[mark] = min(map(len, lines), default=0) if len({len(line) for line in lines}) == 1 else 0
    if default == "\t" and counts.get(default, 0) > 1:
        return default
    best = max(counts, key=counts.__getitem__, default=default)
    return best if counts.get(best, 0) > 1 else default


def _build_columns(lines: Sequence[Sequence[Any]]) -> Columns:
    """Return the columns of rows of cells, of which the first has the names.

    Rows without a value at the end of a file, and columns without name and value, are what spreadsheets leave behind.

    Raises:
        ValueError: the names are not different, or rows differ in length.
    """
    header, rows = list(map(format_name, lines[0])) if lines else [], list(lines[1:])
    while rows and not any(map(format_name, rows[-1])):
        rows.pop()
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            title = "; the names of all columns stand there: remove a title above them" if len(header) == 1 else ""
            raise ValueError(f"line {number} has {len(row)} fields, the first line {len(header)}{title}")
    columns = [np.array([format_name(row[i]) for row in rows], dtype=_TEXT) for i in range(len(header))]
    used = {place: name for place, name in enumerate(header, start=1) if name or np.any(columns[place - 1] != "")}
    names = list(used.values())
    if "" in names or not names:
        place = next((f"column {place}" for place, name in used.items() if not name), "any column")
        raise ValueError(
            f"no name for {place} in the first line ({list_first(filter(None, header), 6) or 'empty'}); "
            "expected one for each column: remove titles, merged cells and empty lines above the table"
        )
    return _collect((name, columns[place - 1]) for place, name in used.items())


def _collect(columns: Iterable[tuple[str, np.ndarray]]) -> Columns:
    """Return columns by their clean names.

    Raises:
        ValueError: two have one name.
    """
    found: Columns = {}
    for name, column in columns:
        if (name := clean_name(name)) in found:
            raise ValueError(f"two columns {name!r}; expected one: remove or rename the other")
        found[name] = column
    return found


def _read_parquet(path: Path, columns: Collection[str] = (), *, header_only: bool = False) -> Columns:
    with require_extra(f"{path}, unless you convert it to CSV,", "parquet", DataError):
        from pyarrow import parquet, types

    schema = parquet.read_schema(path)
    known = schema.names
    # An error about a missing column names those that the table has.
    wanted = sorted(columns, key=known.index) if columns and set(columns) <= set(known) else None
    table = schema.empty_table() if header_only else parquet.read_table(path, columns=wanted)
    values = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        # Whole numbers with missing ones would become float64, in which long identifiers are not exact.
        if types.is_floating(column.type) or (types.is_integer(column.type) and not column.null_count):
            values.append((name, _to_column(column.to_numpy())))
        else:
            values.append((name, _to_column(column.to_pylist())))
    return _collect(values)


def _read_excel(path: Path) -> Columns:
    """Read the only sheet of a workbook: numbers as Excel stores them, with the leading zeros that a format shows."""
    with require_extra(f"{path}, unless you save it as CSV UTF-8,", "excel", DataError):
        from openpyxl import load_workbook
    if not is_zipfile(path):
        raise ValueError("it is no xlsx workbook, or has a password; save it as xlsx without one, or as CSV UTF-8")
    sheets: dict[bool, list[list[Any]]] = {}
    for has_values in (True, False):
        with closing(load_workbook(path, read_only=True, data_only=has_values)) as book:
            if len(book.worksheets) != 1:
                raise ValueError(f"the workbook has {len(book.worksheets)} sheets; expected one: save one in a file")
            sheet = book.worksheets[0]
            # The size that a file states may be wrong.
            sheet.reset_dimensions()
            sheets[has_values] = [list(row) for row in sheet.iter_rows()]
    width = max(map(len, sheets[True]), default=0)
    for cells, formulas in zip(sheets[True], sheets[False], strict=True):
        for cell, formula in zip(cells, formulas, strict=True):
            if cell.value is None and formula.value is not None:
                raise ValueError(
                    f"cell {formula.coordinate} has a formula without a stored result; open and save the workbook"
                )
    return _build_columns([[*map(_show_cell, row), *[None] * (width - len(row))] for row in sheets[True]])


def _show_cell(cell: Any) -> object:
    value = cell.value
    if isinstance(value, bool):
        return str(value).upper()
    is_padded = isinstance(value, int) and re.fullmatch("0+", str(cell.number_format))
    return str(value).zfill(len(cell.number_format)) if is_padded else value


def _read_sqlite(path: Path) -> Columns:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        found = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY type DESC, 1")
        names = [name for (name,) in found if not name.startswith("sqlite_")]
        if len(names) != 1:
            raise ValueError(f"the database has {len(names)} tables ({list_first(names)}); expected one table or view")
        rows = database.execute('SELECT * FROM "{}"'.format(names[0].replace('"', '""')))  # noqa: S608 - its own name
        return _build_columns([[column[0] for column in rows.description], *rows])


def _read_npz(path: Path) -> Columns:
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
    columns: Columns = {}
    for name, values in arrays.items():
        if len(values) == rows:
            columns |= {name: values} if values.ndim == 1 else {f"{name}_{i}": own for i, own in enumerate(values.T)}
    return _collect(
        (name, _to_column(values.astype(np.int64) if values.dtype == bool else values))
        for name, values in columns.items()
    )


_READERS: dict[str, Callable[[Path], Columns]] = {
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".tsv": _read_csv,
    ".tsv.gz": _read_csv,
    ".xlsx": _read_excel,
    ".parquet": _read_parquet,
    ".sqlite": _read_sqlite,
    ".npz": _read_npz,
}


def _to_column(values: Sequence[object] | np.ndarray) -> np.ndarray:
    """Return numbers as they are stored, and anything else as text."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        is_unsigned = values.dtype == np.uint64
        return values if is_unsigned else values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
    return np.array(list(map(format_name, values)), dtype=_TEXT)
