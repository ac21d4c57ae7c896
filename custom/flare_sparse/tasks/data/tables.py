"""Tables with one row per subject, of every format that hospitals export; a cell is the characters in the file.

What a column is depends on its use: :meth:`Table.get_names` returns names (core/names.py), :meth:`Table.get_numbers`
numbers, by the rules of a job for missing and unreadable ones. Files that store numbers as such (Parquet,
npz) keep them, since they have no characters.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import DataError, list_first, suggest
from ...core.names import find_number, find_similar, format_names
from .table_files import Columns, read_columns

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})
"""Texts, in lower case, that stand for a missing number or an undeclared category; a missing name is an empty text."""
Decimal = Literal[".", ","]
"""Decimal mark of numbers. With a comma, a column may also have points, but not both."""
DATES = (
    "it contains dates such as {date}. Compute a number from them in a column of its own, such as the age in years or "
    "the days since admission; a date itself mostly tells when a site took part"
)
"""What is wrong with a column of dates, and the remedy."""
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([ T].*)?|\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2})")


def is_number(text: str) -> bool:
    """Return whether a text is a number or marks a missing value."""
    return text.lower() in MISSING or find_number(text) is not None


def read_cell(text: str, decimal: Decimal = ".") -> float | None:
    """Return the number of a cell, NaN where one is missing; None: it is no number.

    >>> read_cell("1,5", ","), read_cell("neg")
    (1.5, None)
    """
    if text.lower() in MISSING:
        return np.nan
    if decimal == "," and text.count(",") == 1 and "." not in text:
        text = text.replace(",", ".")
    return find_number(text)


def find_date(column: np.ndarray) -> str:
    """Return the first value of a column of dates, such as ``2019-03-01`` or ``1.3.19``; else ""."""
    if column.dtype.kind in "iuf":
        return ""
    texts = [text for text in np.unique(column).tolist() if text.lower() not in MISSING]
    return str(texts[0]) if texts and all(_DATE.fullmatch(text) for text in texts) else ""


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    Attributes:
        source: file that the table was read from, named in errors.
        columns: text as in the file, without white space around it; numbers where the file stores numbers.
        codes: texts that stand for missing values, by column.
        decimal: the decimal mark of numbers.
    """

    source: Path
    columns: Columns
    codes: Mapping[str, Collection[str]] = field(default_factory=dict)
    decimal: Decimal = "."
    # The sites of a simulated federation share a table.
    _numbers: dict[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    def get_column(self, name: str) -> np.ndarray:
        """Return a column as the file has it.

        Raises:
            DataError: there is no such column.
        """
        if name not in self.columns:
            names = list(self.columns)
            similar = find_similar(name, names)
            hint = f" Did you mean {similar!r}?" if similar else suggest(name, names)
            raise DataError(f"{self.source}: no column {name!r}.{hint} Found: {list_first(names)}")
        return self.columns[name]

    def get_names(self, name: str) -> list[str]:
        """Return a column as names; empty where a cell is empty or has one of the column's codes for missing values.

        Raises:
            DataError: there is no such column, or it has numbers that cannot be told apart.
        """
        try:
            names = format_names(self.get_column(name))
        except ValueError as error:
            raise DataError(f"{self.source}: column {name!r}: {error}") from error
        codes = self.codes.get(name, ())
        return ["" if text in codes else text for text in names] if codes else names

    def get_numbers(self, name: str) -> np.ndarray:
        """Return a column of numbers, float64 ``(n,)``; NaN where a value is missing.

        Raises:
            DataError: there is no such column, or a cell is no finite number; it shows the first such cell.
        """
        if name not in self._numbers:
            if date := self.find_date(name):
                raise DataError(f"{self.source}: column {name!r} must have numbers, but {DATES.format(date=date)}")
            values, wrong = self._read_numbers(name)
            if len(wrong):
                raise DataError(f"{self.source}: {self._describe_cells(name, wrong)}")
            self._numbers[name] = values
        return self._numbers[name]

    def is_text(self, name: str) -> bool:
        """Return whether most cells of a column that are not missing are no numbers."""
        if name in self._numbers:
            return False
        values, wrong = self._read_numbers(name)
        return len(wrong) > int(np.count_nonzero(np.isfinite(values)))

    def _read_numbers(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a column's numbers, NaN where there is none, and the rows, from 0, of cells that are no numbers."""
        column, codes = self.get_column(name), self.codes.get(name, ())
        numeric = [number for code in codes if (number := find_number(code)) is not None]
        if column.dtype.kind in "iuf":
            values = column.astype(np.float64)
            wrong = np.isinf(values)
        else:
            texts = column.tolist()
            found = [read_cell(text, self.decimal) for text in texts]
            values = np.array([np.nan if number is None else number for number in found], dtype=np.float64)
            is_code = np.isin(column, list(codes)) if codes else np.zeros(len(texts), dtype=bool)
            is_bad = np.array([number is None for number in found], dtype=bool) | self._find_mixed_marks(texts)
            wrong = (is_bad | np.isinf(values)) & ~is_code
        if numeric:
            is_code = np.isin(values, numeric)
            values, wrong = np.where(is_code, np.nan, values), wrong & ~is_code
        return values, np.flatnonzero(wrong)

    def _find_mixed_marks(self, texts: Sequence[str]) -> np.ndarray:
        """Return which cells have a decimal point where others of the column have a decimal comma."""
        marks = np.zeros(len(texts), dtype=bool)
        if self.decimal == "," and any("," in text for text in texts):
            marks = np.array(["." in text for text in texts])
        return marks

    def _describe_cells(self, name: str, rows: np.ndarray) -> str:
        """Return the problem of cells that are no numbers: the first of them, its row, their number and the remedy."""
        column = self.get_column(name)
        first, text = int(rows[0]), str(column[rows[0]])
        share = f"{len(rows)} of {len(column)} cells" if len(rows) > 1 else "the only such cell"
        return (
            f"column {name!r} contains text such as {text!r} (row {first + 1}; {share}); expected numbers. If it "
            f"stands for a missing value, set task.missing_codes: {{{name}: {text!r}}}; if its comma is a decimal one, "
            "task.decimal: ',' and write all cells of the column alike; else correct the cell: a number has no unit, "
            "no mark of thousands, no < or >"
        )

    def find_date(self, name: str) -> str:
        """Return the first value of a column of dates; else ""."""
        return find_date(self.get_column(name))

    def get_ids(self, name: str) -> tuple[str, ...]:
        """Return the unique identifiers in a column.

        Raises:
            DataError: there is no such column, or an identifier is missing or occurs twice.
        """
        ids = self.get_names(name)
        if "" in ids:
            raise DataError(
                f"{self.source}: column {name!r} has no identifier in {ids.count('')} of {len(ids)} rows (first: row "
                f"{ids.index('') + 1}); fill it in, or remove rows of units and totals"
            )
        if repeated := [name for name, count in Counter(ids).items() if count > 1]:
            raise DataError(
                f"{self.source}: {len(repeated)} identifiers in column {name!r} occur more than once (first: "
                f"{repeated[0]!r}). If a subject has several rows, set task.group: {name} and task.id: null; "
                "otherwise remove the repeated rows"
            )
        return tuple(ids)


def read_table(path: Path, columns: Collection[str] = ()) -> Table:
    """Read a table; arguments and errors are as in :func:`~flare_sparse.tasks.data.table_files.read_columns`."""
    return Table(path, read_columns(path, columns))
