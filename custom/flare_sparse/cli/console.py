"""What the command line says, and how it ends: 0 done, 1 failed, 2 the configuration is wrong."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import ConfigError, FlareSparseError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def exit_code(error: FlareSparseError) -> int:
    """2 for a configuration, 1 for anything else."""
    return 2 if isinstance(error, ConfigError) else 1


def say(error: FlareSparseError) -> None:
    """One block, no traceback: the code to look up, then what was wrong and the way out."""
    err.print(f"[bold red]error[/] {error.code} (docs/troubleshooting.md)")
    err.print(str(error), markup=False)


class Commands(TyperGroup):
    """The commands; an error of ours ends any of them with its message and its exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlareSparseError as error:
            say(error)
            raise typer.Exit(exit_code(error)) from error
