"""The source file of a user task: what travels with a BYOC job and is kept beside a run's record."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

from ..config import RunConfig, load_user_task_class
from ..task import Task


def list_user_modules(config: RunConfig, file: Path) -> tuple[Path, ...]:
    """Return the source file of the user task; empty for a task of this package."""
    user_task_class = load_user_task_class(config, file.parent)
    return (Path(inspect.getfile(user_task_class)),) if user_task_class else ()


def copy_user_module(user_task_class: type[Task] | None, out: Path) -> None:
    """Copy the user task's source file into the result folder, so that the model can be loaded from there later."""
    if user_task_class is not None and (source := Path(inspect.getfile(user_task_class))).parent != out:
        shutil.copy2(source, out / source.name)
