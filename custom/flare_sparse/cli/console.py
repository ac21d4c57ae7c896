"""The command line's consoles and exit codes: 0 success, 1 failure, 2 a wrong configuration.

``flare-sparse run`` has more: see its help.
"""

from __future__ import annotations

import inspect
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..core.errors import ConfigError, FlareSparseError
from ..core.findings import Finding

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def get_exit_code(error: FlareSparseError) -> int:
    """Return 2 for a wrong configuration, 1 for any other error."""
    return 2 if isinstance(error, ConfigError) else 1


COLOURS = {"PASS": "bold green", "FAIL": "bold red"}


def print_finding(console: Console, finding: Finding) -> None:
    """Print a finding: its severity in colour, place, code and text."""
    severity = finding.severity
    console.print(f"[{COLOURS.get(severity, 'bold yellow')}]{severity}[/]", end=" ")
    console.print(str(finding).removeprefix(f"{severity} "), markup=False)


def print_error(error: FlareSparseError) -> None:
    """Print an error without a traceback: its code, then the cause and the way out, then the notes."""
    err.print(f"[bold red]error[/] {error.code} (docs/troubleshooting.md)")
    for text in (str(error), *getattr(error, "__notes__", ())):
        # A record or a message of somebody else may be quoted: nothing in it may move the cursor.
        err.print("".join(c for c in text if c in "\n\t" or c.isprintable()), markup=False)


def join_lines(text: str) -> str:
    """Join the lines of every paragraph of a docstring, except examples: the terminal wraps the help to its width."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else part.replace("\n", " ") for part in paragraphs)


class Commands(TyperGroup):
    """Group of all commands; an error of this package ends a command with the error's text and exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlareSparseError as error:
            print_error(error)
            raise typer.Exit(get_exit_code(error)) from error
