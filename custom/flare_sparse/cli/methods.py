"""``flare-sparse methods``: list the methods, or every setting of one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .console import out as console
from .settings_table import build_settings_table, get_first_line

if TYPE_CHECKING:
    from ..config.needs import Feature
    from ..methods.method import Method


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show the settings of this method; module.Class for one of your own")
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Show which method works with which feature")] = False,
) -> None:
    """List the methods with their sources, or the settings of one with default, range and meaning.

    [dim]flare-sparse methods[/]

    [dim]flare-sparse methods neurosfl[/]

    [dim]flare-sparse methods my_methods.Mine[/]

    [dim]flare-sparse methods --matrix[/]
    """
    from ..config.compatibility import list_columns
    from ..config.plugins import load_entry
    from ..methods.registry import METHODS

    if matrix:
        columns = list_columns()
        console.print(_build_matrix(columns, [name] if name else list(METHODS)))
        for number, feature in enumerate(columns, 1):
            console.print(f"{number:>2} {feature.name}: {feature.effect}", markup=False, highlight=False)
    elif name is None:
        console.print(_list_methods())
        print_plugins("method")
    else:
        method = load_entry("method", name, Path.cwd())
        console.print(build_settings_table(method.Config, "method", find_source(method)))


def print_plugins(section: str) -> None:
    """Print the methods or tasks of other distributions, which are not imported for it, and how to use one's own."""
    from ..config.plugins import list_plugins

    plugins = list_plugins(section)
    if plugins:
        table = Table("name", "class", "distribution", box=None, pad_edge=False, title=f"installed {section}s")
        table.title_justify = "left"
        for plugin in plugins:
            table.add_row(f"[bold]{escape(plugin.name)}[/]", escape(plugin.path), escape(plugin.distribution))
        console.print(table)
    page = {"method": "docs/new-method.md", "task": "docs/own-task.md"}[section]
    console.print(f"\nA {section} of your own is one class: {page}", markup=False)


def find_source(method: type[Method[Any, Any]]) -> str:
    """Return the paper that the method's module cites in its first line."""
    return get_first_line(inspect.getmodule(method)).partition(":")[0]


def _build_matrix(columns: Sequence[Feature], names: Sequence[str]) -> Table:
    """Return the methods as rows and the features as numbered columns."""
    from ..config.compatibility import find_reasons

    table = Table("method", *map(str, range(1, len(columns) + 1)), box=None, pad_edge=False)
    reasons = [find_reasons(feature) for feature in columns]
    for name in names:
        table.add_row(f"[bold]{name}[/]", *("[red]no[/]" if column[name] else "yes" for column in reasons))
    return table


def _list_methods() -> Table:
    from ..methods.registry import METHODS

    table = Table("name", "what happens in a round", "source", box=None, pad_edge=False)
    for name, method in METHODS.items():
        table.add_row(f"[bold]{name}[/]", escape(get_first_line(method)), escape(find_source(method)))
    return table
