"""``flare-sparse methods``: list the methods, or every setting of one."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..core.errors import ConfigError, suggest
from ..methods.method import Method
from ..methods.registry import METHODS
from .console import out as console
from .settings_table import build_settings_table, get_first_line


def methods(name: Annotated[str | None, typer.Argument(help="Show the settings of this method")] = None) -> None:
    """List the methods with their sources, or the settings of one with default, range and meaning.

    [dim]flare-sparse methods[/]

    [dim]flare-sparse methods neurosfl[/]
    """
    if name is None:
        console.print(_list_methods())
    elif name in METHODS:
        console.print(build_settings_table(METHODS[name].Config, "method", find_source(METHODS[name])))
    else:
        raise ConfigError(f"there is no method {name!r}; expected one of {', '.join(METHODS)}.{suggest(name, METHODS)}")


def find_source(method: type[Method[Any, Any]]) -> str:
    """Return the paper that the method's module cites in its first line."""
    return get_first_line(inspect.getmodule(method)).partition(":")[0]


def _list_methods() -> Table:
    table = Table("name", "what happens in a round", "source", box=None, pad_edge=False)
    for name, method in METHODS.items():
        table.add_row(f"[bold]{name}[/]", escape(get_first_line(method)), escape(find_source(method)))
    return table
