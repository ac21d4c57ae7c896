"""docs/bad_input.csv and the tests name the same rows: every row has its test, and every test its row."""

from __future__ import annotations

import ast
import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "docs" / "bad_input.csv"
CODE = re.compile(r"[EW]_[A-Z_]+")

ROWS = {int(row["row"]): row for row in csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines())}


@dataclass(frozen=True)
class Function:
    """A function of a test module; ``row`` is the argument of its marker ``row``, None without one."""

    name: str
    row: int | None
    source: str


@cache
def read_functions(module: str) -> list[Function]:
    """Return the functions of a module."""
    source = (HERE / f"{module}.py").read_text(encoding="utf-8")
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [Function(node.name, find_row(node), ast.get_source_segment(source, node) or "") for node in nodes]


def find_row(node: ast.FunctionDef) -> int | None:
    """Return the row that a test is marked with."""
    marks = [mark for mark in node.decorator_list if ast.unparse(mark).startswith("pytest.mark.row(")]
    return ast.literal_eval(marks[0].args[0]) if marks and isinstance(marks[0], ast.Call) else None


@pytest.mark.slow
@pytest.mark.parametrize("number", ROWS)
def test_codes_of_a_row_are_those_of_its_test(number: int) -> None:
    row = ROWS[number]
    module = f"test_{row['test']}"
    functions = read_functions(module)
    source = "".join(function.source for function in functions if function.row == number)
    helpers = "".join(
        function.source
        for function in functions
        if not function.name.startswith("test_") and f"{function.name}(" in source
    )
    implied = "E_DATA" if module == "test_data" else ""
    assert [code for code in CODE.findall(row["code"]) if code not in source + helpers + implied] == []


def test_every_marked_test_has_its_row() -> None:
    modules = sorted(path.stem for path in HERE.glob("test_*.py"))
    marked = {
        (function.row, module) for module in modules for function in read_functions(module) if function.row is not None
    }
    assert marked == {(number, f"test_{row['test']}") for number, row in ROWS.items()}
