"""Names in data: identifiers, sites, groups, categories and columns are the characters in their files (docs/names.md).

Two names are equal if they have the same characters, in Unicode's normal form C and without white space around them.
Nothing else makes names equal: neither case, nor leading zeros, nor the number that both spell.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError, list_first, suggest

EXACT = 2**53
"""Whole numbers below it are exact as float64; above it, neighbours become equal."""


def clean_name(text: str) -> str:
    """Return a name as it is compared: in normal form C, without white space around it.

    >>> clean_name(" Zoe" + chr(0x308)) == "Zo" + chr(0xEB), clean_name("007") == clean_name("7")
    (True, False)
    """
    return unicodedata.normalize("NFC", text).strip()


def clean_names(content: Any) -> Any:
    """Return the content of a settings file with each of its texts as :func:`clean_name` returns it."""
    if isinstance(content, str):
        return clean_name(content)
    if isinstance(content, (list, tuple)):
        return type(content)(clean_names(item) for item in content)
    if isinstance(content, dict):
        return {clean_names(key): clean_names(value) for key, value in content.items()}
    return content


def list_beginnings(name: str) -> set[str]:
    """Return a name as it is compared, and its beginnings up to each mark.

    >>> sorted(list_beginnings("case_1.nii"))
    ['case', 'case_1', 'case_1.nii']
    """
    text = clean_name(name)
    return {text, *(text[: mark.start()] for mark in re.finditer(r"[^A-Za-z0-9]", text))} - {""}


def format_names(values: np.ndarray) -> list[str]:
    """Return names as text; numbers that a file stores as such, whole ones without a decimal point; "" for NaN.

    >>> format_names(np.array([7.0, np.nan])), format_names(np.array(["007 "]))
    (['7', ''], ['007'])

    Raises:
        ValueError: a float64 is too large to tell two names apart.
    """
    return [format_name(value) for value in values.tolist()]


def format_name(value: object) -> str:
    """Return one of the names that :func:`format_names` returns."""
    if isinstance(value, float):
        if abs(value) >= EXACT:
            raise ValueError(
                f"{value:.0f} is stored as a number in floating point, in which it cannot be told from its "
                "neighbours; store names as text or whole numbers"
            )
        return "" if isnan(value) else str(int(value)) if value.is_integer() else repr(value)
    return "" if value is None else clean_name(str(value))


def parse_numbers(values: np.ndarray) -> np.ndarray:
    """Return numbers of a column that may hold them as text, float64; NaN where a cell is empty.

    Raises:
        ValueError: a cell is no number.
    """
    numbers = [find_number(text) if (text := str(value)) else np.nan for value in values.tolist()]
    if None in numbers:
        row = numbers.index(None)
        raise ValueError(f"{str(values[row])!r} (row {row + 1}) is no number")
    return np.array(numbers, dtype=np.float64)


def find_number(text: str) -> float | None:
    """Return the number that a text spells with ASCII digits, as in other programs; None: it spells none.

    Python alone would also read ``1_000`` and full-width digits.

    >>> find_number("1e3"), find_number("1_000")
    (1000.0, None)
    """
    if "_" in text or not text.isascii():
        return None
    try:
        return float(text)
    except ValueError:
        return None


def read_names(file: Path) -> frozenset[str]:
    """Return the names in a file, one a line; blank lines are ignored.

    Raises:
        DataError: the file cannot be read as text.
    """
    try:
        lines = decode_text(file.read_bytes()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}. Expected one identifier of a subject a line") from error
    return frozenset(name for line in lines if (name := clean_name(line)))


def decode_text(content: bytes) -> str:
    """Return the text of a file in normal form C: UTF-8, or UTF-16 with the mark at its start that spreadsheets write.

    Raises:
        UnicodeDecodeError: it is another encoding.
    """
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return unicodedata.normalize("NFC", content.decode(encoding))


def find_similar(name: str, known: Iterable[str]) -> str:
    """Return the known name that differs from a name only in spelling; empty if there is none.

    Such differences are case, accents, separators, units in brackets, leading zeros, ``sub-``, and another way to write
    the same number.

    >>> find_similar("3", ["002", "003"]), find_similar("4E1", ["40.0"]), find_similar("a b", ["A_B"])
    ('003', '40.0', 'A_B')
    """
    folded, number = _fold(name), find_number(name)
    same = (other for other in known if folded and _fold(other) == folded)
    equal = (other for other in known if number is not None and find_number(other) == number)
    return next(same, "") or next(equal, "")


def list_similar(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of names that differ only in spelling, as :func:`find_similar` compares them.

    >>> list_similar(["a", "40", "A", "4E1", "b"])
    [['40', '4E1'], ['A', 'a']]
    """
    groups: dict[object, list[str]] = {}
    for name in sorted(set(names)):
        number = find_number(name)
        groups.setdefault(_fold(name) if number is None else number, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def describe_unknown(name: str, known: Collection[str], where: str) -> str:
    """Return that a name is not among the known ones, with both spellings where one nearly matches.

    >>> describe_unknown("3", ["003"], "the table")
    "'3' is not in the table, which has '003'; names are compared character by character"
    """
    if similar := find_similar(name, known):
        return f"{name!r} is not in {where}, which has {similar!r}; names are compared character by character"
    return f"{name!r} is not in {where}{suggest(name, known).replace(' Did', '. Did')}"


def describe_absent(column: str, columns: Collection[str]) -> str:
    """Return that there is no such column, with the most similar one and those that there are.

    >>> describe_absent("aeg", ["age", "sex"])
    "no column 'aeg'. Did you mean 'age'? Found: age, sex"
    """
    similar = find_similar(column, columns)
    hint = f" Did you mean {similar!r}?" if similar else suggest(column, columns)
    return f"no column {column!r}.{hint} Found: {list_first(columns) or 'none'}"


def _fold(name: str) -> tuple[str, ...]:
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", name) if not unicodedata.combining(letter))
    plain = re.sub(r"^sub-|\s*[\[(][^\[(]*[\])]$|\.0+$", "", plain.casefold())
    return tuple(part.lstrip("0") or "0" for part in re.findall(r"\d+|[^\W\d_]+", plain))
