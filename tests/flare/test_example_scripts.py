"""The benchmark of FLARE's example scripts: what it changes in a script, and which cells it calls not run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "exchange" / "scripts.py"


@pytest.fixture(scope="module")
def scripts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_scripts", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "client.py").write_text("".join(f"line{n} = {n}\n" for n in range(20)))
    (folder / "model.py").write_text("net = 1\n")
    return folder


def test_copy_differs_from_the_script_by_the_patch_alone(scripts: ModuleType, source: Path, tmp_path: Path) -> None:
    example = scripts.Example("model.Net", "", (("line3 = 3", 'line3 = "data"'), ("line9 = 9", "line9 = 0")))
    patch = scripts.write_example(source, example, tmp_path).splitlines()
    changed = [line for line in patch if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ["-line3 = 3", '+line3 = "data"', "-line9 = 9", "+line9 = 0"]
    assert scripts.count_lines(patch) == 2
    lines, original = ((folder / "client.py").read_text().splitlines() for folder in (tmp_path, source))
    assert [n for n in range(20) if lines[n] != original[n]] == [3, 9]
    assert (tmp_path / "model.py").read_text() == "net = 1\n"


def test_patch_of_more_than_six_lines_or_of_a_missing_line_is_refused(
    scripts: ModuleType, source: Path, tmp_path: Path
) -> None:
    many = tuple((f"line{n} = {n}", f"line{n} = 0") for n in range(10, 17))
    with pytest.raises(SystemExit, match="7 lines changed; at most 6"):
        scripts.write_example(source, scripts.Example("model.Net", "", many), tmp_path)
    with pytest.raises(SystemExit, match="expected the line 'path = 1' once"):
        scripts.write_example(source, scripts.Example("model.Net", "", (("path = 1", "path = 2"),)), tmp_path)


def test_cells_that_were_not_run_are_named(scripts: ModuleType) -> None:
    cell = {"script": "hello-pt", "exchange": "fedsparsify", "mode": "in process", "accuracy": 0.5, "ledger": 1234,
            "measured": 5678, "changed": 1}  # fmt: skip
    rows = scripts.format_table([cell]).splitlines()
    assert "| hello-pt | fedsparsify | in process | 0.500 | 1,234 | 5,678 |  | 1 |" in rows
    examples = len(scripts.list_examples(Path()))
    assert sum("not run" in row for row in rows) == examples * len(scripts.EXCHANGES) * len(scripts.MODES) - 1
