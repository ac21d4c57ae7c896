"""The table of ``kernels.py``, docs/results/kernels.csv: to CSV and back; later runs add to earlier ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

KEY = ("what", "network", "pattern", "sparsity", "batch", "threads")
"""Fields that tell a line from all others."""
COLUMNS = {"sparsity": ".2f", "dense_s": ".4f", "sparse_s": ".4f", "ratio": ".2f", "onnx_s": ".4f"}
"""Formats of the columns that are not written as they are."""
FIELDS = (*KEY, "dense_s", "sparse_s", "ratio", "onnx_s")

Line = dict[str, Any]


def merge_lines(earlier: Iterable[Line], later: Iterable[Line]) -> list[Line]:
    """Return all lines, a later one in place of an earlier one of the same key; numbers of threads lie side by side."""
    merged = {tuple(line.get(name) for name in KEY): line for line in (*earlier, *later)}
    order = {key[:-1]: number for number, key in reversed(list(enumerate(merged)))}
    return [merged[key] for key in sorted(merged, key=lambda key: (order[key[:-1]], key[-1]))]


def format_table(lines: Iterable[Line]) -> str:
    """Return a CSV text; a value that a line lacks is empty."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(FIELDS)
    for line in lines:
        values = ((name, line.get(name)) for name in FIELDS)
        table.writerow("" if value is None else format(value, COLUMNS.get(name, "")) for name, value in values)
    return text.getvalue()


def read_table(text: str) -> list[Line]:
    """Return the lines of a text that :func:`format_table` wrote."""
    types = {"batch": int, "threads": int} | dict.fromkeys(COLUMNS, float)
    return [
        {name: types.get(name, str)(value) for name, value in row.items() if value}
        for row in csv.DictReader(io.StringIO(text))
    ]


def update_table(table: str, lines: Iterable[Line]) -> str:
    """Return a CSV text that has the lines, too."""
    return format_table(merge_lines(read_table(table), lines))
