"""Tables with one row per subject, of every format that hospitals export; a cell is the characters in the file.

What a column is depends on its use: :meth:`Table.get_names` returns names (core/names.py), :meth:`Table.get_numbers`
numbers. Files that store numbers as such (Parquet, npz) keep them, since they have no characters.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...core.errors import DataError, list_first, suggest
from ...core.names import find_number, find_similar, format_names
from .cells import DATES, PLAIN, Spelling, describe_remedy, find_date, find_unit, read_cell
from .table_files import Columns, read_columns


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
            is_bad = np.array([number is None for number in found], dtype=bool) | self._find_mixed_marks(texts)
            wrong = (is_bad | np.isinf(values)) & ~is_code
        if numeric:
            is_code = np.isin(values, numeric)
            values, wrong = np.where(is_code, np.nan, values), wrong & ~is_code
        return values, np.flatnonzero(wrong)

    def _find_mixed_marks(self, texts: Sequence[str]) -> np.ndarray:
        """Return which cells have a decimal point where others of the column have a decimal comma."""
        marks = np.zeros(len(texts), dtype=bool)
        if self.spelling.decimal == "," and any("," in text for text in texts):
            marks = np.array(["." in text for text in texts])
        return marks

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
            DataError: there is no such column, or an identifier occurs twice.
        """
        ids = tuple(self.get_names(name))
        if len(set(ids)) < len(ids):
            duplicate = next(value for value in ids if ids.count(value) > 1)
            raise DataError(f"{self.source}: {name} {duplicate!r} occurs twice; remove one row")
        return ids


def read_table(path: Path, columns: Collection[str] = ()) -> Table:
    """Read a table; arguments and errors are as in :func:`~flare_sparse.tasks.data.table_files.read_columns`."""
    return Table(path, read_columns(path, columns))
