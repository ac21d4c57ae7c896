"""Cells of columns of numbers: what counts as a number, as a missing one, and what to do about the others."""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ...core.names import find_number

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


def is_number(text: str) -> bool:
    """Return whether a text is a number or marks a missing value."""
    return text.lower() in MISSING or find_number(text) is not None


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
