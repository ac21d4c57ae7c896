"""Pages of the documentation site that the package itself writes: commands, settings, API; and tables from CSV files.

MkDocs calls the functions ``on_...`` (.ci/mkdocs.yml). Nothing of this is committed.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, get_args

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from typer.main import get_command

import flare_sparse
from flare_sparse import client
from flare_sparse.cli import COMMANDS, app
from flare_sparse.cli.settings import find_source, get_first_line, iterate_settings
from flare_sparse.config.policy.policy import Policy
from flare_sparse.config.schema import RunConfig
from flare_sparse.methods.method import MethodConfig
from flare_sparse.methods.registry import METHODS
from flare_sparse.tasks.data.source import SiteFile
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import TaskConfig

ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository"
"""Folder of the site with files of the repository that pages link to."""
RANKS = {"results": 0.2, "reference": 0.3, "algorithms.md": 0.2, "wire-format.md": 0.2}
"""How far the search moves a page, or the pages of a folder, down: tables of figures come last."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the files outside docs/ that pages link to."""
    for name, text in (("cli", format_commands()), ("settings", format_settings())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    linked = {file for page in files.documentation_pages() for file in list_outside_links(page)}
    for file in sorted(linked):
        name = f"{COPIES}/{file.relative_to(ROOT)}"
        files.append(File.generated(config, name, abs_src_path=str(file)))
    return files


def list_outside_links(page: File) -> Iterator[Path]:
    """Yield the files of the repository outside docs/ that a page links to, but no folders and no pages."""
    source = Path(page.abs_src_path or "")
    if source.is_file():
        for _, _, target, _ in LINK.findall(source.read_text(encoding="utf-8")):
            file = (source.parent / target).resolve()
            if file.is_file() and not file.is_relative_to(ROOT / "docs") and file.suffix != ".md":
                yield file


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put tables and the API in the place of their marks, let links to the repository point into the site, rank."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    if rank := RANKS.get(page.file.src_uri.partition("/")[0]):
        page.meta["search"] = {"boost": rank}
    page.meta["tags"] = list(list_questions(page.file.src_uri))

    def insert_table(match: re.Match[str]) -> str:
        with (folder / match[1]).open(encoding="utf-8", newline="") as file:
            return format_table(list(csv.reader(file)))

    def move_link(match: re.Match[str]) -> str:
        target = (folder / match[3]).resolve()
        if match[2] == target.name and target.suffix == ".md" and target.is_file():
            return f"[{find_title(target)}]({match[3]}{match[4] or ''})"
        if "://" in match[3] or not target.exists() or target.is_relative_to(ROOT / "docs"):
            return match[0]
        if target.is_dir() or target.suffix == ".md":
            return f"{match[2]} (`{target.relative_to(ROOT)}` in the repository)"
        up = "../" * page.file.src_uri.count("/")
        return f"[{match[2]}]({up}{COPIES}/{target.relative_to(ROOT)})"

    markdown = re.sub(r"^<!-- table: (\S+) -->$", insert_table, markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^Table of \d+ rows: \[\S+\]\((\S+)\)\.$", insert_table, markdown, flags=re.MULTILINE)
    return LINK.sub(move_link, markdown.replace("<!-- api -->", format_api()))


def list_questions(page: str) -> Iterator[str]:
    """Yield the questions that a page answers: the search weighs them above every title."""
    for part in (ROOT / "docs" / "questions.md").read_text(encoding="utf-8").split("\n### ")[1:]:
        question, _, answer = part.partition("\n")
        if page in (target for _, _, target, _ in LINK.findall(answer)):
            yield question


def find_title(page: Path) -> str:
    """Return the first heading of a page."""
    return page.read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0]


def format_table(rows: list[list[str]]) -> str:
    """Return a Markdown table whose first row is its head: names of settings may be broken there, after their dots."""
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    head = [re.sub(r"\.(?=\w)", ".<wbr>", cell) for cell in lines[0]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *lines[1:]])


def format_api() -> str:
    """Return the public names, as mkdocstrings reads them."""
    parts = [("flare_sparse", flare_sparse.__all__, flare_sparse), ("flare_sparse.client", client.__all__, client)]
    lines = []
    for module, names, place in parts:
        lines += ["", f"## {module}", ""]
        for name in names:
            value = getattr(place, name)
            lines += ["", f"::: {value.__module__}.{value.__qualname__}"]
    return "\n".join(lines)


def format_commands() -> str:
    """Return the page of all commands: what ``--help`` says."""
    lines = ["# Command line", "", "Every command, as `flare-sparse COMMAND --help` shows it.", ""]
    for name in COMMANDS:
        for path, command in list_commands(f"flare-sparse {name}", get_command(app).commands[name]):
            usage = " ".join(p.name.upper() for p in command.params if p.param_type_name == "argument")
            lines += [f"## {path.removeprefix('flare-sparse ')}", "", *format_help(command.help or "")]
            lines += [f"`{path} {usage} [OPTIONS]`".replace("  ", " "), ""]
            lines += [
                format_table([["argument or option", "default", "meaning"], *map(list_cells, command.params)]),
                "",
            ]
    return "\n".join(lines)


def list_commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the full name of each command that does something, with the command."""
    if not hasattr(command, "commands"):
        yield path, command
    for name, part in getattr(command, "commands", {}).items():
        yield from list_commands(f"{path} {name}", part)


def list_cells(parameter: Any) -> list[str]:
    """Return name, default and meaning of a parameter."""
    is_argument = parameter.param_type_name == "argument"
    names = parameter.name.upper() if is_argument else ", ".join((*parameter.opts, *parameter.secondary_opts))
    default = "required" if parameter.required else parameter.default
    shown = "" if callable(default) or default in (None, False, (), []) else f"`{default}`"
    return [f"`{names}`", shown if not parameter.required else "required", strip_markup(parameter.help or "")]


def format_help(text: str) -> Iterator[str]:
    """Yield the paragraphs of a command's description; examples in a row become one block of code."""
    paragraphs = [" ".join(strip_markup(paragraph).split()) for paragraph in text.split("\n\n")]
    for are_examples, group in itertools.groupby(paragraphs, lambda plain: plain.startswith("flare-sparse ")):
        lines = list(group)
        yield "\n".join(["```bash", *lines, "```", ""]) if are_examples else "\n\n".join([*lines, ""])


def strip_markup(text: str) -> str:
    """Return a text without rich's marks for its look, its placeholders such as <name> safe from HTML."""
    return re.sub(r"\[/?(?:dim|bold|red|green|cyan|yellow)?\]", "", text).replace("<", "&lt;")


def format_settings() -> str:
    """Return the page of all settings: section by section, then methods and tasks with what is their own."""
    lines = ["# Settings", "", "Every setting of a configuration, from the schema that validates it.", ""]
    for name, field in RunConfig.model_fields.items():
        section = find_section(field.annotation)
        if section is not None and name not in ("method", "task"):
            lines += [f"## {name}", "", get_first_line(section), "", format_rows(section, name), ""]
    lines += ["## method", "", "Of every method:", "", format_rows(MethodConfig, "method"), ""]
    common = set(iterate_settings(MethodConfig, "method"))
    for name, method in METHODS.items():
        lines += [f"### {name}", "", f"{find_source(method)}. {get_first_line(method)}", ""]
        lines += [format_rows(method.Config, "method", common), ""]
    lines += ["## task", "", "Of every task:", "", format_rows(TaskConfig, "task"), ""]
    common = set(iterate_settings(TaskConfig, "task"))
    for name, task in TASKS.items():
        lines += [f"### {name}", "", f"{get_first_line(task)} {task.reads}", ""]
        lines += [format_rows(task.Config, "task", common), ""]
    lines += ["## A site's policy", "", get_first_line(Policy), "", format_rows(Policy, ""), ""]
    lines += ["## The site file", "", get_first_line(SiteFile), "", format_rows(SiteFile, ""), ""]
    return "\n".join(lines)


def find_section(annotation: Any) -> type[BaseModel] | None:
    """Return the class of a section's settings; None for a single setting."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def format_rows(section: type[BaseModel], name: str, common: Collection[tuple[str, ...]] = ()) -> str:
    """Return a table of the settings of a section that are not common ones."""
    rows = [row for row in iterate_settings(section, name) if row not in common]
    if not rows:
        return "No settings of its own."
    cells = [[f"`{path.removeprefix('.')}`", f"`{default}`", allowed, text] for path, default, allowed, text in rows]
    return format_table([["setting", "default", "allowed", "meaning"], *cells])
