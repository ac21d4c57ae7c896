"""What the docs say exists: every error code has its row, every link leads somewhere, every command is real."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import flare_sparse
from flare_sparse.cli import app

ROOT = Path(__file__).parents[1]
PACKAGE = Path(next(iter(flare_sparse.__path__)))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
CODE = re.compile(r"E_[A-Z_]+")


def codes_in_the_package() -> set[str]:
    """String literals of the package that are a whole error code."""
    return {
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
    } - {"E_"}


def test_every_error_code_has_its_row() -> None:
    rows = [line for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines() if line.startswith("| `E_")]
    documented = {code for row in rows for code in CODE.findall(row.split("|")[1])}
    assert codes_in_the_package() - documented == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


def test_the_task_of_the_docs_passes_the_check(tmp_path: Path) -> None:
    (module,), (configuration,) = blocks("own-task.md", "python"), blocks("own-task.md", "yaml")
    (tmp_path / "my_tasks.py").write_text(module)
    (tmp_path / "dose.yaml").write_text(configuration)
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    for site in ("site-1", "site-2", "site-3"):
        x = rng.random((20, 10))
        np.savez(tmp_path / "data" / f"{site}.npz", x=x, y=x.sum(1))
    result = CliRunner().invoke(app, ["check", str(tmp_path / "dose.yaml")])
    assert result.exit_code == 0, result.output
    assert "PASS data of site-3: 16 training and 4 test examples" in result.output
    assert "PASS one training step" in result.output
