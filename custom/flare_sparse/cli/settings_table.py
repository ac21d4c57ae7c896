"""The settings of a method or a task as a table: name, default, allowed values and meaning."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.markup import escape
from rich.table import Table

from ..config.problems import format_allowed


def build_settings_table(config: type[BaseModel], section: str, title: str) -> Table:
    """Return a row for each setting of ``config``; names are folded, never cut, in a narrow terminal.

    Args:
        config: class of the settings.
        section: section of the configuration, ``"method"`` or ``"task"``.
        title: line above the table.
    """
    table = Table(box=None, pad_edge=False, title=escape(title))
    table.title_justify = "left"
    rows = list(iterate_settings(config, section))
    # rich cuts a word that is wider than its column, and a setting that cannot be read cannot be typed.
    table.add_column("setting", min_width=max((len(row[0]) for row in rows), default=0), no_wrap=True)
    for column in ("default", "allowed", "meaning"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def get_first_line(documented: Any) -> str:
    """Return the first line of a docstring as plain text; empty without one."""
    return (inspect.getdoc(documented) or "").partition("\n")[0].replace("``", "")


def iterate_settings(
    config: type[BaseModel], path: str, section: BaseModel | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield path, default, allowed values and meaning of each setting; ``section`` overrides the defaults."""
    for name, field in config.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        # A method may have defaults of its own for a section that it shares with others, as the LoRA methods have.
        default = default if section is None else getattr(section, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            nested = default if isinstance(default, BaseModel) else None
            yield from iterate_settings(field.annotation, f"{path}.{name}", nested)
            # The settings of a network depend on its name; shown are those of the default network.
            for key, value in ((nested.model_extra or {}) if nested else {}).items():
                yield f"{path}.{name}.{key}", json.dumps(value), "as the network needs", "setting of this network"
            continue
        shown = "required" if default is PydanticUndefined else json.dumps(default, default=str).strip('"')
        yield f"{path}.{name}", shown, format_allowed(field), field.description or ""
