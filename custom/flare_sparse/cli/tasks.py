"""``flare-sparse tasks``: list the built-in tasks, or every setting of one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from .console import out as console
from .methods import print_plugins
from .settings_table import build_settings_table, get_first_line

if TYPE_CHECKING:
    from ..tasks.task import Task


def tasks(
    name: Annotated[
        str | None, typer.Argument(help="Show the settings of this task; module.Class for a task of your own")
    ] = None,
) -> None:
    """List the built-in tasks with the data that they read, or the settings of one with default, range and meaning.

    [dim]flare-sparse tasks[/]

    [dim]flare-sparse tasks table[/]

    [dim]flare-sparse tasks my_tasks.Dose[/]
    """
    from ..config.plugins import load_entry

    if name is None:
        console.print(_list_tasks())
        print_plugins("task")
        return
    task_class = load_entry("task", name, Path.cwd())
    console.print(build_settings_table(task_class.Config, "task", _describe_target(task_class)))
    console.print(f"\nmetric: {_describe_metric(task_class)}", markup=False)
    if task_class.reads:
        console.print(f"data:   {task_class.reads}", markup=False)


def _list_tasks() -> Table:
    from ..tasks.registry import TASKS

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True, min_width=max(map(len, TASKS)))
    for column in ("what it predicts", "metric", "data that it reads"):
        table.add_column(column, overflow="fold")
    for name, task_class in TASKS.items():
        cells = _describe_target(task_class), _describe_metric(task_class), task_class.reads
        table.add_row(f"[bold]{name}[/]", *(escape(cell) for cell in cells))
    return table


def _describe_target(task_class: type[Task]) -> str:
    # The rest of the line has the shapes of a batch, for readers of the code.
    return get_first_line(task_class).partition(";")[0].rstrip(".")


def _describe_metric(task_class: type[Task]) -> str:
    metric = task_class.metric
    unit = f" in {metric.unit}" if metric.unit else ""
    return f"{metric.name}{unit}, {'lower' if metric.mode == 'min' else 'higher'} is better"
