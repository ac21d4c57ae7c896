"""The command line's consoles and exit codes: 0 success, 1 failure, 2 a wrong configuration.

``flare-sparse run`` has more: see its help.
"""

import inspect
import json
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.errors import FlareSparseError
from ..core.findings import Finding
from ..results.runs.progress import Printer

_PAGE = re.compile(r"\bdocs/([\w./-]+\.md)")


_INSTALLED, _SOURCE = Path(__file__).parents[1] / "docs", Path(__file__).parents[3] / "docs"
PAGES = _INSTALLED if _INSTALLED.is_dir() else _SOURCE
"""Folder of the pages: in the wheel below the package, in the repository beside it."""


def locate_pages(text: str) -> str:
    """Return a text whose pages (``docs/NAME.md``) can be opened from the working directory."""

    def locate(match: re.Match[str]) -> str:
        return match[0] if Path(match[0]).is_file() else str(PAGES / match[1])

    return _PAGE.sub(locate, text)


class PageConsole(Console):
    """A console that prints text as it is, whoever wrote it, and names each page by where it is."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(locate_pages(text) if isinstance(text, str) else text for text in objects), **options)


class LastingConsole(PageConsole):
    """A console whose command goes on when nobody reads it any more; it is quiet from then on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


out = PageConsole()
err = LastingConsole(stderr=True)
JSON = ContextVar("JSON", default=False)
"""Whether the command line has --json, an option of all commands that programs read."""


def print_json(value: Any) -> bool:
    """Print a value as JSON if the command line asks for it, and return whether it does."""
    if JSON.get():
        typer.echo(json.dumps(value, indent=2))
    return JSON.get()


class Screen(Printer):
    """Prints a line for each round, problems with the data to standard error.

    Args:
        console: receives the lines; None: standard output, as long as somebody reads it.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or LastingConsole()
        super().__init__(self._console.print, err.print)

    def wait(self, text: str) -> AbstractContextManager[Any]:
        return self._console.status(text)


COLOURS = {"PASS": "bold green", "FAIL": "bold red"}


def print_finding(finding: Finding) -> None:
    """Print a finding: its severity in colour, place, code and text."""
    severity = finding.severity
    out.print(severity, style=COLOURS.get(severity, "bold yellow"), end=" ")
    out.print(str(finding).removeprefix(f"{severity} "))


def print_error(error: FlareSparseError) -> None:
    """Print an error without a traceback: its code, then the cause and the way out, then the notes."""
    err.print("error", style="bold red", end=" ")
    err.print(f"{error.code} (docs/troubleshooting.md)")
    for text in (str(error), *getattr(error, "__notes__", ())):
        # A record or a message of somebody else may be quoted: nothing in it may move the cursor.
        err.print("".join(c for c in text if c in "\n\t" or c.isprintable()))


def build_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] | None = None
) -> Table:
    """Return a table of plain text; nothing in it is read as markup.

    Args:
        title: line above it, may be empty.
        columns: heads of the columns.
        rows: cells by row.
        left: heads of the left-aligned columns; the others are right-aligned. None: the first one.
    """
    # As Text: nothing that a table holds is read as markup, whatever console prints it.
    table = Table(title=Text(title, "table.title") if title else None, title_justify="left")
    for column in columns:
        is_left = column in (columns[:1] if left is None else left)
        table.add_column(Text(column), justify="left" if is_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def join_lines(text: str) -> str:
    """Join the lines of every paragraph of a docstring, except examples: the terminal wraps the help to its width."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else part.replace("\n", " ") for part in paragraphs)
