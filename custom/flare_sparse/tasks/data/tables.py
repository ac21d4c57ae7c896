"""Tables with one row per subject, of every format that hospitals export; a cell is the characters in the file.

What a column is depends on its use: :meth:`Table.get_names` returns names (core/names.py), :meth:`Table.get_numbers`
numbers, by the rules of a job for missing, censored and unreadable ones. Files that store numbers as such (Parquet,
npz) keep them, since they have no characters.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from ...core.errors import DataError
from ...core.names import describe_absent, find_number, format_names
from .table_files import Columns, read_columns

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})
"""Texts, in lower case, that stand for a missing number or an undeclared category; a missing name is an empty text."""
Censored = Literal["refuse", "limit", "half"]
DATES = (
    "it contains dates such as {date}. Compute a number from them in a column of its own, such as the age in years or "
    "the days since admission; a date itself mostly tells when a site took part"
)
"""What is wrong with a column of dates, and the remedy."""
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}([ T].*)?|\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2})")
_NUMBER = r"[+-]?(?:\d+[.,]?\d*|[.,]\d+)(?:[eE][+-]?\d+)?"
_CENSORED = r"([<>≤≥]=?)\s*(.+)"
_THOUSANDS = r"[+-]?\d{1,3}(?:[ ,.'_\u00a0\u202f]\d{3})+(?:[.,]\d+)?"
_WITH_UNIT = rf"{_NUMBER}\s*([^\d\s].*)"
_MOST_LABELS = 10
"""Most labels of a column of categories such as ``1a`` and ``2a``, which are no numbers with a unit."""
_REMEDIES = {
    _CENSORED: "Set task.censored: half or limit, to compute with {2}, or correct the cell",
    r"#.*": "It is an error of a spreadsheet: correct the cell, or {code}",
    r"[+-]?inf(inity)?": "It is no finite number, such as a quotient by 0: correct the cell, or {code}",
    _NUMBER: "Set task.decimal: ',' if the comma is a decimal one, and write all cells of the column alike; else "
    "remove the mark of thousands",
    _THOUSANDS: "Remove the marks of thousands",
    _WITH_UNIT: "Remove {1!r} from the cells: a column has one unit, which its name may say",
    r".*": "{units}If it stands for a missing value, {code}; else correct the cell",
}
"""What to do about a cell, by pattern; the first one that fits."""


@dataclass(frozen=True)
class Spelling:
    """How the cells of a column of numbers are written.

    Attributes:
        decimal: the decimal mark. With a comma, a column may also have points, but not both.
        censored: what ``<90`` and ``>200`` are: errors, the limit, or half of a lower limit and an upper limit.
    """

    decimal: Literal[".", ","] = "."
    censored: Censored = "refuse"


PLAIN = Spelling()


def read_cell(text: str, spelling: Spelling = PLAIN) -> float | None:
    """Return the number of a cell, NaN where one is missing; None: it is no number.

    >>> read_cell("<90", Spelling(censored="half")), read_cell("1,5", Spelling(decimal=",")), read_cell("neg")
    (45.0, 1.5, None)
    """
    if (number := find_number(text)) is not None:
        return number
    if text.lower() in MISSING:
        return np.nan
    if spelling.censored != "refuse" and (found := re.fullmatch(_CENSORED, text)):
        limit = read_cell(found[2], replace(spelling, censored="refuse"))
        is_halved = spelling.censored == "half" and found[1][0] in "<≤"
        return limit / 2 if limit is not None and is_halved else limit
    if spelling.decimal == "," and text.count(",") == 1 and "." not in text:
        return find_number(text.replace(",", "."))
    return None


def describe_remedy(column: str, text: str, *, is_first: bool) -> str:
    """Return what to do about a cell that is no number.

    Args:
        column: name of its column.
        text: the cell.
        is_first: whether it is in the first row, where some tables have units.
    """
    for pattern, remedy in _REMEDIES.items():
        if found := re.fullmatch(pattern, text, re.IGNORECASE | re.DOTALL):
            code = f"set task.missing_codes: {{{column}: {text!r}}}"
            units = "If the first row has units, remove it. " if is_first else ""
            return remedy.format(text, *found.groups(), code=code, units=units)
    raise AssertionError("the last pattern fits each text")


def find_unit(texts: Collection[str]) -> str:
    """Return the unit behind the numbers of more texts than a category has labels; else "".

    >>> find_unit([f"{i} mmHg" for i in range(20)]), find_unit(["1a", "2a"])
    ('mmHg', '')
    """
    units = {found[1] if (found := re.fullmatch(_WITH_UNIT, text)) else "" for text in texts}
    return units.pop() if len(units) == 1 and len(texts) > _MOST_LABELS else ""


def find_date(column: np.ndarray) -> str:
    """Return the first value of a column of dates, such as ``2019-03-01``, ``1.3.19`` or 20190301; else ""."""
    if column.dtype.kind in "iuf":
        values = np.unique(column[np.isfinite(column)]).astype(np.float64)
    else:
        texts = [text for text in np.unique(column).tolist() if text.lower() not in MISSING]
        if texts and all(_DATE.fullmatch(text) for text in texts):
            return str(texts[0])
        if not all(re.fullmatch(r"\d{8}(\.0*)?", text) for text in texts):
            return ""
        values = np.unique(np.array(texts, dtype=np.float64))
    years, months, days = values // 10_000, values // 100 % 100, values % 100
    are_dates = (years >= 1900) & (years < 2100) & (months >= 1) & (months <= 12) & (days >= 1) & (days <= 31)
    # A single value, or a constant, may be any number.
    return f"{values[0]:.0f}" if len(values) > 1 and bool((are_dates & (days % 1 == 0)).all()) else ""


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    Attributes:
        source: file that the table was read from, named in errors.
        columns: text as in the file, without white space around it; numbers where the file stores numbers.
        codes: texts that stand for missing values, by column.
        spelling: how numbers are written.
    """

    source: Path
    columns: Columns
    codes: Mapping[str, Collection[str]] = field(default_factory=dict)
    spelling: Spelling = PLAIN
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
            raise DataError(f"{self.source}: {describe_absent(name, self.columns)}")
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

    def require_numbers(self, name: str, are_right: Callable[[np.ndarray], np.ndarray], expected: str) -> np.ndarray:
        """Return a column of numbers, as :meth:`get_numbers`, of which those that are not missing are as expected.

        Raises:
            DataError: likewise, or a number is another.
        """
        values = self.get_numbers(name)
        if len(rows := np.flatnonzero(np.isfinite(values) & ~are_right(values))):
            raise DataError(
                f"{self.source}: column {name!r} is {values[rows[0]]:g} (row {rows[0] + 1}); expected {expected}"
            )
        return values

    def is_text(self, name: str) -> bool:
        """Return whether most cells of a column that are not missing are no numbers, nor numbers with one unit."""
        if name in self._numbers:
            return False
        values, wrong = self._read_numbers(name)
        is_most = len(wrong) > int(np.count_nonzero(np.isfinite(values)))
        return is_most and not find_unit({str(text) for text in self.get_column(name)[wrong]})

    def _read_numbers(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a column's numbers, NaN where there is none, and the rows, from 0, of cells that are no numbers."""
        column, codes = self.get_column(name), self.codes.get(name, ())
        numeric = [number for code in codes if (number := find_number(code)) is not None]
        if column.dtype.kind in "iuf":
            values = column.astype(np.float64)
            wrong = np.isinf(values)
        else:
            texts = column.tolist()
            found = [read_cell(text, self.spelling) for text in texts]
            values = np.array([np.nan if number is None else number for number in found], dtype=np.float64)
            is_code = np.isin(column, list(codes)) if codes else np.zeros(len(texts), dtype=bool)
            # In a column with decimal commas, a point may be a mark of thousands.
            has_commas = self.spelling.decimal == "," and any("," in text for text in texts)
            is_bad = [n is None or (has_commas and "." in text) for n, text in zip(found, texts, strict=True)]
            wrong = (np.array(is_bad, dtype=bool) | np.isinf(values)) & ~is_code
        if numeric:
            is_code = np.isin(values, numeric)
            values, wrong = np.where(is_code, np.nan, values), wrong & ~is_code
        return values, np.flatnonzero(wrong)

    def _describe_cells(self, name: str, rows: np.ndarray) -> str:
        """Return the problem of cells that are no numbers: the first of them, its row, their number and the remedy."""
        column = self.get_column(name)
        first, text = int(rows[0]), str(column[rows[0]])
        share = f"{len(rows)} of {len(column)} cells" if len(rows) > 1 else "the only such cell"
        return (
            f"column {name!r} contains text such as {text!r} (row {first + 1}; {share}); expected numbers. "
            f"{describe_remedy(name, text, is_first=first == 0)}"
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
