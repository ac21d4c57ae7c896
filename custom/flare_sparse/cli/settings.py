"""``flare-sparse settings``: list the methods and tasks, or every setting of one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.table import Table

from ..config.problems import format_allowed
from ..config.yaml_files import list_configurations
from ..core.errors import ConfigError
from .console import build_table
from .console import out as console

if TYPE_CHECKING:
    from ..methods.method import Method
    from ..tasks.task import Task


def settings(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the settings of this method or task; module.Class for one of your own"),
    ] = None,
) -> None:
    """List the methods, tasks and configurations, or the settings of one with default, range and meaning.

    [dim]flare-sparse settings[/]

    [dim]flare-sparse settings neurosfl[/]

    [dim]flare-sparse settings table[/]

    [dim]flare-sparse settings my_tasks.Dose[/]
    """
    if name is None:
        from ..methods.registry import METHODS
        from ..tasks.registry import TASKS

        methods = [(name, get_first_line(method), find_source(method)) for name, method in METHODS.items()]
        console.print(_build_table(("name", "what happens in a round", "source"), methods))
        _print_plugins("method")
        tasks = [(name, _describe_target(task), _describe_metric(task), task.reads) for name, task in TASKS.items()]
        console.print(_build_table(("name", "what it predicts", "metric", "data that it reads"), tasks))
        _print_plugins("task")
        console.print(f"\nconfigurations, for flare-sparse run NAME: {', '.join(list_configurations())}")
        return
    section, entry = _load(name)
    title = find_source(entry) if section == "method" else _describe_target(entry)
    rows = list(iterate_settings(entry.Config, section))
    console.print(_build_table(("setting", "default", "allowed", "meaning"), rows, title))
    if section == "task":
        console.print(f"\nmetric: {_describe_metric(entry)}")
        if entry.reads:
            console.print(f"data:   {entry.reads}")


def _load(name: str) -> tuple[str, type[Any]]:
    """Return whether a name is that of a method or of a task, and its class.

    Raises:
        ConfigError: it is neither.
    """
    from ..config.loading import load_entry

    refusals = []
    for section in ("method", "task"):
        try:
            return section, load_entry(section, name, Path.cwd())
        except ConfigError as error:
            refusals.append(str(error))
    raise ConfigError("\n".join(refusals))


def _print_plugins(section: str) -> None:
    """Print the methods or tasks of other distributions, which are not imported for it, and how to use one's own."""
    from ..config.loading import list_plugins

    if plugins := list_plugins(section):
        console.print(_build_table(("name", "class", "distribution"), plugins, f"installed {section}s"))
    page = {"method": "docs/new-method.md", "task": "docs/own-task.md"}[section]
    console.print(f"\nA {section} of your own is one class: {page}")


def find_source(method: type[Method[Any, Any]]) -> str:
    """Return the paper that the method's module cites in its first line."""
    return get_first_line(inspect.getmodule(method)).partition(":")[0]


def _describe_target(task_class: type[Task]) -> str:
    # The rest of the line has the shapes of a batch, for readers of the code.
    return get_first_line(task_class).partition(";")[0].rstrip(".")


def _describe_metric(task_class: type[Task]) -> str:
    metric = task_class.metric
    unit = f" in {metric.unit}" if metric.unit else ""
    return f"{metric.name}{unit}, {'lower' if metric.mode == 'min' else 'higher'} is better"


def _build_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    """Return a table without lines, whose first column is as wide as its longest cell."""
    table = build_table(title, columns, rows, left=columns)
    table.box, table.pad_edge, first = None, False, table.columns[0]
    # rich cuts a word that is wider than its column, and a setting that cannot be read cannot be typed.
    first.min_width, first.no_wrap, first.style = max((len(row[0]) for row in rows), default=0), True, "bold"
    return table


def get_first_line(documented: Any) -> str:
    """Return the first line of a docstring as plain text; empty without one."""
    return (inspect.getdoc(documented) or "").partition("\n")[0].replace("``", "")


def iterate_settings(
    config: type[BaseModel], path: str, section: BaseModel | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield path, default, allowed values and meaning of each setting, those of the class itself first.

    ``section`` overrides the defaults.
    """
    inherited = {name for parent in config.__mro__[1:] for name in getattr(parent, "model_fields", ())}
    for name, field in sorted(config.model_fields.items(), key=lambda item: item[0] in inherited):
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
