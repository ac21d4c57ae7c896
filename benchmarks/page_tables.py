"""Sections of the pages of results that a benchmark writes, and tables that are too long for a page: CSV files."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
LONGEST = 13
"""Most rows of a table that stands on a page although it is not the first of its section."""


def write_section(page: str, section: str, text: str, names: Mapping[int, str] | None = None) -> None:
    """Write what stands between the marks ``<!-- SECTION -->`` and ``<!-- end of SECTION -->`` of a page.

    Args:
        page: name of a page of ``docs/results``.
        section: name of the section.
        text: Markdown, whose last line ends; its headings become one level lower.
        names: name of a table by its number in the text, from 1; a long one that is not the first goes to
            ``<section>_<name>.csv``.
    """
    number, names = 0, names or {}

    def move_table(match: re.Match[str]) -> str:
        nonlocal number
        number += 1
        lines = match[0].splitlines()
        if number == 1 or number not in names or len(lines) - 2 <= LONGEST:
            return match[0]
        rows = [[re.sub(r"\*\*|`", "", cell).strip() for cell in line.split("|")[1:-1]] for line in lines]
        file = RESULTS / f"{section}_{names[number]}.csv"
        with file.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows([rows[0], *rows[2:]])
        return f"Table of {len(rows) - 2} rows: [{file.name}]({file.name}).\n"

    path, start, end = RESULTS / f"{page}.md", f"<!-- {section} -->", f"<!-- end of {section} -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(start)
    text = re.sub(r"^(#+ )", r"#\1", TABLE.sub(move_table, text), flags=re.MULTILINE)
    path.write_text(f"{before}{start}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")
