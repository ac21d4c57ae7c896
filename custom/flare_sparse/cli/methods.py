"""``flare-sparse methods``: what there is to choose from, and every setting of one method."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.markup import escape
from rich.table import Table

from ..config.problems import format_allowed
from ..errors import ConfigError, suggest
from ..methods import METHODS, Method
from .console import out as console


def methods(name: Annotated[str | None, typer.Argument(help="Show all settings of this method.")] = None) -> None:
    """List the methods, or the settings of one.

    [dim]flare-sparse methods[/]
    [dim]flare-sparse methods neurosfl[/]
    """
    if name is None:
        console.print(_overview())
    elif name in METHODS:
        console.print(_settings(METHODS[name]))
    else:
        raise ConfigError(f"there is no method {name!r}; expected one of {', '.join(METHODS)}.{suggest(name, METHODS)}")


def source(method: type[Method[Any]]) -> str:
    """The paper that a method's module opens with."""
    return _first_line(inspect.getmodule(method)).partition(":")[0]


def _overview() -> Table:
    table = Table("name", "what happens in a round", "source", box=None, pad_edge=False)
    for name, method in METHODS.items():
        table.add_row(f"[bold]{name}[/]", escape(_first_line(method)), escape(source(method)))
    return table


def _settings(method: type[Method[Any]]) -> Table:
    table = Table("setting", "default", "allowed", "meaning", box=None, pad_edge=False, title=source(method))
    table.title_justify = "left"
    for row in _rows(method.Config, "method"):
        table.add_row(*(escape(cell) for cell in row))
    return table


def _rows(config: type[BaseModel], path: str) -> Iterator[tuple[str, str, str, str]]:
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(field.annotation, f"{path}.{name}")
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "required" if default is PydanticUndefined else json.dumps(default, default=str).strip('"')
        yield f"{path}.{name}", shown, format_allowed(field), field.description or ""


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0].replace("``", "")
