"""The table of the docs and the tests name the same rows: every row has its test, and every test its row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "bad-input.md"
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \| `(\w+)\.py` \|$", re.MULTILINE)
CODE = re.compile(r"`([EW]_[A-Z_]+)`")

ROWS = {int(row[1]): row for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}


def functions_of(module: str) -> dict[str, str]:
    """The source of each function of a module by name."""
    source = (HERE / f"{module}.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(source, node) or "" for node in functions}


def test_the_table_has_the_43_rows() -> None:
    assert sorted(ROWS) == list(range(1, 44))


@pytest.mark.parametrize("number", range(1, 44))
def test_a_row_has_its_test(number: int) -> None:
    row = ROWS[number]
    found = [name for name in functions_of(row[5]) if name.startswith(f"test_row_{number:02d}_")]
    assert found, f"row {number} has no test in {row[5]}.py"


@pytest.mark.parametrize("number", range(1, 44))
def test_a_rows_codes_are_those_that_its_test_looks_for(number: int) -> None:
    row = ROWS[number]
    functions = functions_of(row[5])
    source = "".join(text for name, text in functions.items() if name.startswith(f"test_row_{number:02d}_"))
    helpers = "".join(text for name, text in functions.items() if not name.startswith("test_") and f"{name}(" in source)
    implied = "E_DATA" if row[5] == "test_data" else ""
    assert [code for code in CODE.findall(row[4]) if code not in source + helpers + implied] == []


def test_a_test_has_its_row() -> None:
    modules = sorted(path.stem for path in HERE.glob("test_*.py"))
    named = {
        (int(name[9:11]), module) for module in modules for name in functions_of(module) if name.startswith("test_row_")
    }
    assert named == {(number, row[5]) for number, row in ROWS.items()}
