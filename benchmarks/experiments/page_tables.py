"""Tables that are too long for a page of results: from its Markdown to CSV files beside it."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def move_tables(text: str, page: Path, names: Mapping[int, str]) -> str:
    """Write the tables of a Markdown text that have a name to ``<page>_<name>.csv``; return the text with links.

    Args:
        text: Markdown, whose last line ends.
        page: the page that the text is for; the files lie beside it.
        names: name of a table by its number in the text, from 1; the others stay.
    """
    number = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal number
        number += 1
        if number not in names:
            return match[0]
        rows = [
            [re.sub(r"\*\*|`", "", cell).strip() for cell in line.split("|")[1:-1]] for line in match[0].splitlines()
        ]
        file = page.with_name(f"{page.stem}_{names[number]}.csv")
        with file.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows([rows[0], *rows[2:]])
        return f"Table of {len(rows) - 2} rows: [{file.name}]({file.name}).\n"

    return TABLE.sub(replace, text)
