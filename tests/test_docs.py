"""What the docs say exists: every error code has its row, every link leads somewhere, every command is real."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import flare_sparse
from flare_sparse.cli import app
from flare_sparse.config import load_config

ROOT = Path(__file__).parents[1]
PACKAGE = Path(next(iter(flare_sparse.__path__)))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
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


def command_lines(page: Path, program: str) -> Iterator[str]:
    """What follows a program in fenced shell blocks and in inline code, up to the end of that command."""
    text = page.read_text()
    fenced = re.findall(r"```(?:bash|sh)\n(.*?)```", text, flags=re.DOTALL)
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\n", " "))
    for block in [*fenced, *inline]:
        for line in block.replace("\\\n", " ").splitlines():
            for found in re.finditer(rf"(?:^|[\s;&]){program}\s+([^;&#]*)", line):
                yield found[1].strip()


def unknown_in(line: str) -> set[str]:
    """Options of a ``flare-sparse`` line that its command does not have; all of it where there is no such command."""
    command: Any = get_command(app)
    words = line.split()
    while words and hasattr(command, "commands"):
        names = words.pop(0).split("|")  # site allow|no-code KIT
        if names[0] in ("CONFIG", "COMMAND") or names[0].startswith("-"):
            break
        if any(name not in command.commands for name in names):
            return {line}
        command = command.commands[names[0]]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(words))) - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_can_be_typed(page: Path) -> None:
    found = {line: unknown_in(line) for line in command_lines(page, "flare-sparse")}
    assert {line: unknown for line, unknown in found.items() if unknown} == {}
    named = set(re.findall(r"(?:app_configs|jobs|benchmarks|poc)/[\w./-]*\w", page.read_text()))
    assert {name for name in named if not (ROOT / name).exists() and not name.startswith("poc/workspace")} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_on_a_page_is_one_that_its_configuration_takes(page: Path) -> None:
    for line in command_lines(page, "flare-sparse"):
        words = shlex.split(line)
        files = [word for word in words if word.startswith("app_configs/") and (ROOT / word).is_file()]
        settings = [value for option, value in pairwise(words) if option == "--set"]
        if len(files) == 1 and "=S" not in line:  # S stands for a number
            load_config(ROOT / files[0], settings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_benchmark_on_a_page_has_the_options_it_is_given(page: Path) -> None:
    for line in command_lines(page, r"(?:python|\$\(which python\))"):
        script, *rest = line.split() or [""]
        if script.startswith("benchmarks/"):
            known = set(re.findall(r'"(--[a-z-]+)"', (ROOT / script).read_text()))
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(rest))) - known == set(), line


def test_a_command_that_is_not_there_is_noticed() -> None:
    assert unknown_in("run CONFIG --env poc --sites 3") == set()
    assert unknown_in("run CONFIG --envv poc") == {"--envv"}
    assert unknown_in("site allow|nocode KIT") == {"site allow|nocode KIT"}


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
