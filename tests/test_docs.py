"""The pages agree with the package: error codes, links, commands, settings and glossary terms exist."""

from __future__ import annotations

import ast
import csv
import importlib.util
import json
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from nnunet_data import require_nnunet, write_raw
from typer.main import get_command
from typer.testing import CliRunner

import flare_sparse
from flare_sparse.cli import app
from flare_sparse.config.loading import load_config, serialize_job
from flare_sparse.core.version import VERSION
from flare_sparse.tasks.data.partition import PARTITIONS

ROOT = Path(__file__).parents[1]
PACKAGE = Path(next(iter(flare_sparse.__path__)))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("docs/**/*.md")])
CODE = re.compile(r"E_[A-Z_]+")
FOLDERS = ("app_configs", "benchmarks", "custom", "docs", "poc", "tests")
SUFFIXES = (".md", ".py", ".yaml", ".ipynb", ".jinja")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
SOURCES = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *(p for p in FILES if "workspace" not in p.parts)]
OUTSIDE = re.compile(
    r"\b(?:ALGORITHMS|FINDINGS|FLARE_NOTES|ECOSYSTEM)\b|\b(?:STYLE|DESIGN|LANGUAGE|RELIABILITY|LEARNING|PRIVACY)\.md\b"
    r"|\(C\d(?:, C\d)*\)|\bconvention C\d\b"
)
"""Names of documents that a reader of the repository does not have."""


def find_error_codes() -> set[str]:
    """String literals of the package that are an error code and nothing else."""
    return {
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
    } - {"E_"}


def read_column(table: str, name: str) -> set[str]:
    """The values of a column of a table of the docs."""
    with (ROOT / "docs" / table).open(encoding="utf-8", newline="") as file:
        return {row[name] for row in csv.DictReader(file)}


@pytest.mark.slow
def test_every_error_code_has_a_row() -> None:
    assert find_error_codes() - read_column("error_codes.csv", "code") == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_point_to_existing_files(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text) + re.findall(
        r"^\[[^\]]+\]: (?!https?:)(\S+)", text, re.MULTILINE
    )
    assert [link for link in links if not (page.parent / link).exists()] == []


def list_anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub derives them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_of_links_are_headings(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text())
    assert [(file, a) for file, a in links if a not in list_anchors(page.parent / file if file else page)] == []


RESULTS = sorted(path for path in (ROOT / "docs/results").glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_results_stand_on_their_page(page: Path) -> None:
    """A reader of the repository sees tables, and every section that a benchmark writes has its end."""
    text = page.read_text()
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert max(len(table.splitlines()) for table in tables) >= 6
    marks = re.findall(r"^<!-- (?!end of )(\w+) -->$", text, re.MULTILINE)
    assert marks == re.findall(r"^<!-- end of (\w+) -->$", text, re.MULTILINE)
    written = [path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")]
    for mark in marks:
        assert any(f'write_section("{page.stem}", ' in code and mark.partition("_")[0] in code for code in written)


def test_eight_pages_of_results_show_every_table_file() -> None:
    shown = {name for page in RESULTS for name in re.findall(r"\]\((\w+\.csv)\)", page.read_text())}
    assert shown == {path.name for path in (ROOT / "docs/results").glob("*.csv")}
    assert len(RESULTS) == 8


def find_command_lines(page: Path, program: str) -> Iterator[str]:
    """Arguments of each call of ``program`` in the fenced shell blocks and the inline code of a page."""
    text = page.read_text()
    fenced = re.findall(r"```(?:bash|sh)\n(.*?)```", text, flags=re.DOTALL)
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\n", " "))
    for block in [*fenced, *inline]:
        for line in block.replace("\\\n", " ").splitlines():
            for found in re.finditer(rf"(?:^|[\s;&]){program}\s+([^;&#]*)", line):
                yield found[1].strip()


def find_unknown_options(line: str) -> set[str]:
    """Options of a ``flare-sparse`` line that its command lacks; the whole line if there is no such command."""
    root: Any = get_command(app)
    command, words = root, line.split()
    while words and hasattr(command, "commands"):
        names = words.pop(0).split("|")  # site setup|log KIT
        if names[0] in ("CONFIG", "COMMAND") or names[0].startswith("-"):
            break
        if any(name not in command.commands for name in names):
            return {line}
        command = command.commands[names[0]]
    known = {option for parameter in (*command.params, *root.params) for option in parameter.opts} | {"--help"}
    # What is in quotes is the value of an option, such as another program's command line.
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", " ".join(words))
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", unquoted)) - known


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_paths_on_a_page_exist(page: Path) -> None:
    unknown = {line: find_unknown_options(line) for line in find_command_lines(page, "flare-sparse")}
    assert {line: options for line, options in unknown.items() if options} == {}
    named = set(re.findall(r"(?:app_configs|jobs|benchmarks|poc)/[\w./-]*\w", page.read_text()))
    assert {name for name in named if not (ROOT / name).exists() and not name.startswith("poc/workspace")} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_on_a_page_are_accepted_by_their_configuration(page: Path) -> None:
    for line in find_command_lines(page, "flare-sparse"):
        words = shlex.split(line)
        files = [word for word in words if word.startswith("app_configs/") and (ROOT / word).is_file()]
        settings = [value for option, value in pairwise(words) if option == "--set"]
        if len(files) == 1 and "=S" not in line:  # S stands for a number
            load_config(ROOT / files[0], settings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_benchmarks_on_a_page_have_the_options_shown(page: Path) -> None:
    for line in find_command_lines(page, r"(?:python|\$\(which python\))"):
        script, *rest = line.split() or [""]
        if script.startswith("benchmarks/"):
            known = set(re.findall(r'"(--[a-z-]+)"', (ROOT / script).read_text()))
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(rest))) - known == set(), line


def test_unknown_commands_and_options_are_found() -> None:
    assert find_unknown_options("run CONFIG --env poc --start new") == set()
    assert find_unknown_options("run CONFIG --envv poc") == {"--envv"}
    assert find_unknown_options("site setup|allow KIT") == {"site setup|allow KIT"}


def test_options_that_messages_name_exist() -> None:
    tops: list[Any] = [get_command(app), *get_command(app).commands.values()]
    commands = [command for top in tops for command in (top, *getattr(top, "commands", {}).values())]
    known = {option for command in commands for parameter in command.params for option in parameter.opts}
    named = {
        option
        # Templates, too; the style of the pages has variables of this form.
        for file in (ROOT / "custom").rglob("*")
        if file.suffix in (".py", ".jinja", ".service") and file.name != "parts.html.jinja"
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+\b", file.read_text())
    }
    others = {"--now", "--override", "--lr", "--epochs", "--force", "--timeout"}  # systemctl, ...
    assert named - known - {"--help"} == others


def find_missing_imports(code: str) -> set[str]:
    """Return what code imports from the package and the package does not have."""
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) and node.module]
    return {
        f"{node.module}.{alias.name}"
        for node in imported
        if str(node.module).split(".")[0] == "flare_sparse"
        for alias in node.names
        if not hasattr(importlib.import_module(str(node.module)), alias.name)
        # A submodule is an attribute of its package once it has been imported.
        and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_imports_on_a_page_exist(page: Path) -> None:
    blocks = re.findall(r"^ *```python\n(.*?)```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert {name for block in blocks for name in find_missing_imports(textwrap.dedent(block))} == set()


def test_imports_of_the_benchmarks_exist() -> None:
    scripts = {script: find_missing_imports(script.read_text()) for script in (ROOT / "benchmarks").rglob("*.py")}
    assert {str(script): names for script, names in scripts.items() if names} == {}


def test_glossary_names_exist_in_the_package() -> None:
    words = {word for path in PACKAGE.rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    assert read_column("glossary.csv", "in code") - words == set()


def test_settings_in_the_specification_exist() -> None:
    text = (ROOT / "docs/algorithms.md").read_text()
    sections = re.findall(r"^###[^\n]*[Ss]ettings[^\n]*\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
    paragraphs = re.findall(r"^Settings: .*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    words = {word for path in PACKAGE.rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    named = {name for part in [*sections, *paragraphs] for name in re.findall(r"`(\w+)`", part)}
    assert named
    assert named - words == set()


def expand_braces(path: str) -> list[str]:
    """The paths that a shell makes of ``path`` with at most one pair of braces."""
    head, brace, tail = path.partition("{")
    names, _, ending = tail.partition("}")
    return [f"{head}{name}{ending}" for name in names.split(",")] if brace else [path]


def test_files_named_in_the_specification_exist() -> None:
    named = re.findall(r"`(\w[\w/]*/[\w{},]*(?:\.py)?)`", (ROOT / "docs/algorithms.md").read_text())
    assert named
    assert [file for path in named for file in expand_braces(path) if not (PACKAGE / file).exists()] == []


CITATION = re.compile(
    r"docs/algorithms\.md,\s+sections?\s+(?P<sections>\d+(?:\.\d+)?(?:(?:,|\s+and|\s+to)\s+\d+(?:\.\d+)?)*)"
    r"(?:,\s+(?P<kind>invariant|deviation|vector)s?\s+(?P<number>\d+))?"
)


def list_specification_items() -> dict[str, int]:
    """Length of the last numbered list of each section of the specification, 0 without one, by section number."""
    parts = re.split(r"^##+ (\d+(?:\.\d+)?) .*$", (ROOT / "docs/algorithms.md").read_text(), flags=re.MULTILINE)
    numbers = {
        section: re.findall(r"^(\d+)\. ", text, re.MULTILINE)
        for section, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    vectors = {"8": len(read_column("worked_numbers.csv", "vector"))}
    return {section: int(items[-1]) if items else 0 for section, items in numbers.items()} | vectors


def test_sections_cited_from_the_specification_exist() -> None:
    items = list_specification_items()
    unknown = []
    for path in SOURCES:
        for match in CITATION.finditer(path.read_text()):
            sections = re.findall(r"\d+(?:\.\d+)?", match["sections"])
            # A number belongs to the section before it.
            if not items.keys() >= {*sections} or int(match["number"] or 0) > items[sections[-1]]:
                unknown.append((str(path.relative_to(ROOT)), match[0]))
    assert unknown == []


@pytest.mark.slow
def test_no_text_cites_a_document_outside_the_repository() -> None:
    found = {
        (str(path.relative_to(ROOT)), word)
        for path in SOURCES
        if path != Path(__file__)
        for word in OUTSIDE.findall(path.read_text())
    }
    assert found == set()


def find_fenced_blocks(page: str, language: str) -> list[str]:
    """The fenced blocks in ``language`` of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


SHOWN = re.compile(r"^<!-- shows: ([^\n]+) -->\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A command, and what a page says that it prints; ``...`` stands for any text."""
OWN_FILES = ("own-script.md", "own-task.md", "bundles.md", "new-method.md")
"""Pages whose commands need files of the page: the tests of these pages check what they show."""


TRAINED = re.compile(r"(?<![\d.])\d+\.\d{3}(?!\d)")
"""A figure of a trained model, such as 12.365, whose last digits depend on the processor and the kernels."""


def is_shown_as(text: str, shown: str) -> bool:
    """Whether a page shows a printed line: ``...`` is any text, and a trained figure is within a tenth."""
    pattern = re.escape(TRAINED.sub("<trained>", shown)).replace("<trained>", r"(\d+\.\d{3})").replace(r"\.\.\.", ".*")
    found = re.fullmatch(pattern, text)
    figures = TRAINED.findall(shown)
    return found is not None and all(
        math.isclose(float(a), float(b), rel_tol=0.1) for a, b in zip(found.groups(), figures, strict=True)
    )


def test_shown_lines_are_told_from_others() -> None:
    assert is_shown_as("round 2/2 mae 6.737 years 967.7 kB 3 s", "round 2/2 mae 6.735 years 967.7 kB ...")
    assert not is_shown_as("round 2/2 mae 9.737 years 967.7 kB", "round 2/2 mae 6.735 years 967.7 kB")
    assert not is_shown_as("round 2/2 mae 6.735 years 967.8 kB", "round 2/2 mae 6.735 years 967.7 kB")
    assert not is_shown_as("round 2/2 mae undefined", "round 2/2 mae 6.735")


def check_shown(page: str, command: str, output: str) -> None:
    """Compare what a page shows of a command with what it printed: each line stands there, in this order."""
    ((_, shown),) = (found for found in SHOWN.findall((ROOT / "docs" / page).read_text()) if found[0] == command)
    printed = [" ".join(line.split()) for line in output.splitlines()]
    for line in shown.splitlines():
        place = next((number for number, text in enumerate(printed) if is_shown_as(text, " ".join(line.split()))), None)
        assert place is not None, f"{page}: {line!r} is not in what {command!r} prints:\n{output}"
        printed = printed[place + 1 :]


def test_every_mark_of_what_a_command_prints_has_its_block_and_a_command_that_exists() -> None:
    marks = 0
    for page in (ROOT / "docs").glob("*.md"):
        found = SHOWN.findall(page.read_text())
        assert len(found) == page.read_text().count("<!-- shows: "), page
        for command, shown in found:
            assert command.startswith("flare-sparse "), page
            assert find_unknown_options(command.removeprefix("flare-sparse ")) == set(), page
            assert shown.strip(), page
        marks += len(found)
    assert marks > 8


@pytest.mark.long
def test_commands_print_what_their_pages_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("app_configs").symlink_to(ROOT / "app_configs")
    for folder in ("kit/local", "kit/startup", "data"):
        Path(folder).mkdir(parents=True)
    rights = {"format_version": "1.0", "permissions": {key: {"byoc": "any"} for key in ("project_admin", "lead")}}
    Path("kit/local/authorization.json.default").write_text(json.dumps(rights))
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in OWN_FILES)
    marks = [(page, command) for page in pages for command, _ in SHOWN.findall((ROOT / "docs" / page).read_text())]
    # The run comes first: other pages look at its folder.
    for page, command in sorted(marks, key=lambda mark: " run " not in mark[1]):
        words = shlex.split(command.replace("KIT", "kit").replace("DATA", "data"))[1:]
        words += ["--env", "local"] if words[0] == "run" else []
        check_shown(page, command, CliRunner().invoke(app, words).output)
    assert len(marks) >= 6


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module and the two configurations of docs/own-task.md, and data for both."""
    module, partitioned = find_fenced_blocks("own-task.md", "python")[:2]
    configuration, pooled = find_fenced_blocks("own-task.md", "yaml")
    (tmp_path / "my_tasks.py").write_text(f"{module}\n\n{partitioned}")
    (tmp_path / "dose.yaml").write_text(configuration)
    (tmp_path / "pooled.yaml").write_text(pooled)
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    for site in ("site-1", "site-2", "site-3"):
        x = rng.random((20, 10))
        np.savez(tmp_path / "data" / f"{site}.npz", x=x, y=x.sum(1))
    header = ",".join(["patient", "hospital", "dose", *(f"m{i}" for i in range(10))])
    rows = [",".join([f"p{i}", "AB"[i % 2], f"{i}", *map(str, range(10))]) for i in range(40)]
    (tmp_path / "data" / "cohort.csv").write_text("\n".join([header, *rows]) + "\n")
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def find_site_rows(output: str) -> dict[str, list[str]]:
    """Return the numbers of training and test examples that ``flare-sparse check`` prints, by site."""
    rows = re.findall(r"^PASS site (\S+): (\d+) training, \d+ validation, (\d+) test", output, re.MULTILINE)
    return {name: counts for name, *counts in rows}


def test_example_of_own_task_passes_the_check_command(own_task: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(own_task / "dose.yaml")])
    assert result.exit_code == 0, result.output
    assert find_site_rows(result.output) == {f"site-{i}": ["16", "4"] for i in (1, 2, 3)}
    check_shown("own-task.md", "flare-sparse check dose.yaml", result.output)


def test_example_of_a_partitioned_cohort_gives_each_hospital_its_own_patients(own_task: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(own_task / "pooled.yaml")])
    assert result.exit_code == 0, result.output
    assert find_site_rows(result.output) == {"A": ["16", "4"], "B": ["16", "4"]}


@pytest.fixture
def own_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of docs/own-script.md, in a folder that is not the working directory."""
    model, script = find_fenced_blocks("own-script.md", "python")[:2]
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "model.py").write_text(model)
    (tmp_path / "study" / "client.py").write_text(script)
    (tmp_path / "study" / "study.yaml").write_text(find_fenced_blocks("own-script.md", "yaml")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "study"


@pytest.mark.long
def test_example_of_own_script_learns(own_script: Path) -> None:
    checked = CliRunner().invoke(app, ["check", "study/study.yaml"])
    check_shown("own-script.md", "flare-sparse check study.yaml", checked.output)
    done = CliRunner().invoke(app, ["run", "study/study.yaml", "--env", "local", "--out", "out"])
    assert done.exit_code == 0, done.output
    rounds = [yaml.safe_load(line) for line in Path("out/rounds.jsonl").read_text().splitlines()]
    # The first evaluation is of the untrained model.
    assert rounds[-1]["metrics"]["mse"] < 0.2 < rounds[0]["metrics"]["mse"]
    assert flare_sparse.load_model("out")[0].weight.shape == (32, 12)


def test_job_of_own_script_is_the_one_of_the_recipe(own_script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that the page shows as the new job build the configuration that it shows."""
    diff = find_fenced_blocks("own-script.md", "diff")[0]
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    code = "\n".join(lines).split("recipe.execute")[0]
    monkeypatch.syspath_prepend(str(own_script))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    monkeypatch.chdir(own_script)
    scope: dict[str, Any] = {}
    exec(compile(code, "job.py", "exec"), scope)
    scope["recipe"].export("jobs")
    settings = yaml.safe_load(Path("jobs/study/app/config/flare_sparse.yaml").read_text())
    expected = serialize_job(load_config("study.yaml", ["seed=0", "federation.min_sites=2"]))
    assert settings == expected
    assert {path.name for path in Path("jobs/study/app/custom").iterdir()} == {"client.py", "model.py", "flare_sparse"}
    monkeypatch.delitem(sys.modules, "model", raising=False)


def test_job_of_sparse_recipes_has_the_filters_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new lines of the job add the filters that the page shows for a configuration written by hand."""
    model, script = find_fenced_blocks("own-script.md", "python")[:2]
    (tmp_path / "model.py").write_text(model)
    (tmp_path / "client.py").write_text(script)
    diff = find_fenced_blocks("own-script.md", "diff")[1].splitlines()
    assert sum(line.startswith(("+", "-")) for line in diff) == 2
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(compile("\n".join(line[1:] for line in diff).split("recipe.execute")[0], "job.py", "exec"), scope)
    scope["recipe"].export("jobs")
    expected = json.loads("{" + find_fenced_blocks("own-script.md", "json")[0] + "}")
    for end in ("server", "client"):
        config = json.loads(Path(f"jobs/study/app/config/config_fed_{end}.json").read_text())
        assert {chain: config[chain] for chain in expected} == expected
    monkeypatch.delitem(sys.modules, "model", raising=False)


@pytest.mark.long
def test_bundle_of_the_page_is_trained_and_loaded_by_monai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's blocks, in their order: MONAI makes a bundle, the commands train it, MONAI loads the result."""
    monkeypatch.chdir(tmp_path)
    make, load = find_fenced_blocks("bundles.md", "python")
    exec(make, {})
    (tmp_path / "unet/configs/train.json").write_text(find_fenced_blocks("bundles.md", "json")[0])
    (tmp_path / "brain.yaml").write_text(find_fenced_blocks("bundles.md", "yaml")[0])
    for line in find_fenced_blocks("bundles.md", "bash")[0].splitlines():
        done = CliRunner().invoke(app, shlex.split(line, comments=True)[1:], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        if line.startswith("flare-sparse run"):
            check_shown("bundles.md", line, done.output)
    scope: dict[str, Any] = {}
    exec(load, scope)
    weights = [value for name, value in scope["network"].state_dict().items() if name.endswith("conv.weight")]
    assert 0.85 < sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights) < 0.95
    assert [path.name for path in Path("trained/configs").iterdir()] == ["train.json"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_federation_of_the_page_on_nnunet_is_planned_trained_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_nnunet()
    monkeypatch.chdir(tmp_path)
    for number, site in enumerate(("site-1", "site-2"), start=1):
        write_raw(tmp_path / "data" / site, 4, number)
    (write_raw(tmp_path / "data/new", 1) / "imagesTr").rename(tmp_path / "data/new/imagesTs")
    study = yaml.safe_load(find_fenced_blocks("nnunet.md", "yaml")[0])
    study["method"]["rounds"] = study["method"]["training"]["epochs"] = 1
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    _, commands, job, *_ = find_fenced_blocks("nnunet.md", "bash")
    for line in (*job.splitlines(), *commands.splitlines()):
        if "plan data" in line:
            collected = Path("plan.json").read_bytes()
        if "flare-sparse check" in line:
            assert Path("plan.json").read_bytes() == collected
        done = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, done.output
    assert Path("predictions/case00.nii.gz").is_file()
    checkpoint = torch.load("model/fold_all/checkpoint_final.pth", weights_only=False)
    assert checkpoint["init_args"]["configuration"] == "3d_fullres"


def test_configuration_of_the_page_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(find_fenced_blocks("segmentation.md", "yaml")[0])
    assert load_config(file).simulator is not None


@pytest.mark.long
def test_study_of_the_page_on_tables_finds_the_risk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    age, stage = rng.normal(60, 10, 240), rng.integers(3, size=240)
    times = rng.exponential(np.exp((60 - age) / 20 - stage / 2)) * 40
    table = {"patient": np.arange(240), "age": age, "sex": rng.choice(["F", "M"], 240), "marker": rng.random(240)}
    table |= {"stage": np.array(["I", "II", "III"])[stage], "months": times.clip(0.1, 60), "died": times < 60}
    rows = zip(*table.values(), rng.choice(["A", "B", "C"], 240), strict=True)
    lines = [",".join(str(int(v) if isinstance(v, np.bool_) else v) for v in row) for row in rows]
    Path("patients.csv").write_text("\n".join([",".join([*table, "hospital"]), *lines]))
    Path("study.yaml").write_text(find_fenced_blocks("table-task.md", "yaml")[0])
    for line in find_fenced_blocks("table-task.md", "bash")[0].splitlines():
        words = shlex.split(line, comments=True)[1:]
        words += ["--env", "local", "--set", "method.evaluate_every=100"] if words[0] == "run" else []
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert json.loads(Path("runs/study/summary.json").read_text())["final"]["metrics"]["c_index"] > 0.6


def test_settings_of_the_page_on_training_are_accepted(tmp_path: Path) -> None:
    rest = {"name": "page", "task": {"name": "brain_age"}, "simulator": {"sites": 2, "data": {"phantom": {}}}}
    file = tmp_path / "page.yaml"
    for block in find_fenced_blocks("training.md", "yaml"):
        file.write_text(yaml.safe_dump({**rest, **yaml.safe_load(block)}))
        assert load_config(file).method.config.rounds > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_partitions_on_a_page_are_accepted(page: Path) -> None:
    text = re.sub(r"\s+", " ", page.read_text())
    for section in re.findall(r"(?<!schedule: )(?<!average: )\{kind: \w+[^{}]*(?:\{[^{}]*\}[^{}]*)?\}", text):
        settings = yaml.safe_load(section)
        PARTITIONS[settings.pop("kind")].model_validate(settings)


def test_citation_and_changelog_have_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == VERSION
    assert newest is not None
    assert newest[1] == VERSION


@pytest.mark.slow
def test_check_prints_what_the_page_on_methods_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("random_masks.py").write_text(find_fenced_blocks("new-method.md", "python")[0])
    Path("masks.yaml").write_text(find_fenced_blocks("new-method.md", "yaml")[0])
    checked = CliRunner().invoke(app, ["check", "masks.yaml"], env={"COLUMNS": "200"})
    check_shown("new-method.md", "flare-sparse check masks.yaml", checked.output)


def test_method_that_init_writes_is_the_one_of_the_page() -> None:
    written = (ROOT / "app_configs" / "starters" / "method" / "random_masks.py").read_text()
    assert written.strip() in find_fenced_blocks("new-method.md", "python")[0]
