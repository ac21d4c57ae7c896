"""``flare-sparse methods``: list the methods, or every setting of one."""

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


def methods(name: Annotated[str | None, typer.Argument(help="Show the settings of this method")] = None) -> None:
    """List the methods with their sources, or the settings of one with default, range and meaning.

    [dim]flare-sparse methods[/]

    [dim]flare-sparse methods neurosfl[/]
    """
    if name is None:
        console.print(_list_methods())
    elif name in METHODS:
        console.print(_list_settings(METHODS[name]))
    else:
        raise ConfigError(f"there is no method {name!r}; expected one of {', '.join(METHODS)}.{suggest(name, METHODS)}")


def find_source(method: type[Method[Any, Any]]) -> str:
    """Return the paper that the method's module cites in its first line."""
    return _get_first_line(inspect.getmodule(method)).partition(":")[0]


def _list_methods() -> Table:
    table = Table("name", "what happens in a round", "source", box=None, pad_edge=False)
    for name, method in METHODS.items():
        table.add_row(f"[bold]{name}[/]", escape(_get_first_line(method)), escape(find_source(method)))
    return table


def _list_settings(method: type[Method[Any, Any]]) -> Table:
    table = Table("setting", "default", "allowed", "meaning", box=None, pad_edge=False, title=find_source(method))
    table.title_justify = "left"
    for row in _iterate_settings(method.Config, "method"):
        table.add_row(*(escape(cell) for cell in row))
    return table


def _iterate_settings(
    config: type[BaseModel], path: str, section: BaseModel | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield path, default, allowed values and meaning of each setting; ``section`` overrides the defaults."""
    for name, field in config.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        # A method may have defaults of its own for a section that it shares with others, as the LoRA methods have.
        default = default if section is None else getattr(section, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            nested = default if isinstance(default, BaseModel) else None
            yield from _iterate_settings(field.annotation, f"{path}.{name}", nested)
            continue
        shown = "required" if default is PydanticUndefined else json.dumps(default, default=str).strip('"')
        yield f"{path}.{name}", shown, format_allowed(field), field.description or ""


def _get_first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0].replace("``", "")
