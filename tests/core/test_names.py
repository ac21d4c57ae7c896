"""Names: one reader and one rule of equality for whatever names something in data."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.core.errors import DataError
from flare_sparse.core.names import clean_name, describe_unknown, find_similar, format_names, read_names

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)


@given(NAMES)
def test_a_name_is_equal_in_each_normal_form_and_with_spaces_around_it(name: str) -> None:
    for form in ("NFC", "NFD"):
        assert clean_name(f" {unicodedata.normalize(form, name)}\u00a0") == clean_name(name)
    assert clean_name(clean_name(name)) == clean_name(name)


@pytest.mark.parametrize(
    "names",
    [
        ("007", "7", "0007"),
        ("4E1", "40", "40.0"),
        ("1_000", "1000"),
        ("True", "true", "1"),
        ("a", "A"),
        ("NA", "na", ""),
    ],
)
def test_names_are_not_equal_because_they_spell_one_number_or_letter(names: tuple[str, ...]) -> None:
    assert len({clean_name(name) for name in names}) == len(names)
    assert format_names(np.array(names)) == list(names)


@given(st.integers(7, 20).flatmap(lambda digits: st.integers(10 ** (digits - 1), 10**digits - 1)))
def test_long_codes_stay_what_they_are_however_a_file_stores_them(code: int) -> None:
    neighbours = [code, code + 1]
    assert len(set(format_names(np.array([str(code) for code in neighbours])))) == 2
    assert format_names(np.array(neighbours, dtype=object)) == [str(code) for code in neighbours]
    floats = np.array(neighbours, dtype=np.float64)
    if floats.max() < 2**53:
        assert format_names(floats) == [str(code) for code in neighbours]
    else:
        with pytest.raises(ValueError, match="store names as text"):
            format_names(floats)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("3", "003"),
        ("1003", "1003.0"),
        ("sub-01", "01"),
        ("260100023", "2.60100023E8"),
        ("Zoe", "Zo\u00eb"),
        ("a b", "A-b"),
        ("bp", "bp [mmHg]"),
    ],
)
def test_an_unknown_name_is_shown_with_the_known_one_that_it_nearly_matches(name: str, known: str) -> None:
    assert find_similar(name, ["other", known]) == known
    assert find_similar(known, ["other", name]) == name
    assert f"{name!r} is not in the table, which has {known!r}" in describe_unknown(name, ["other", known], "the table")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_list_of_names_is_read_in_each_encoding_of_an_editor(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(" 007\r\n\r\nZoe\u0308 \n4E1".encode(encoding))
    assert read_names(tmp_path / "a.txt") == {"007", "Zo\u00eb", "4E1"}
    (tmp_path / "a.txt").write_bytes(b"M\xfcller\n")
    with pytest.raises(DataError, match="Expected one identifier of a subject a line"):
        read_names(tmp_path / "a.txt")
