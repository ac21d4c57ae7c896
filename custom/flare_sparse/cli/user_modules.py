"""The source files of a user task: the one that travels with a BYOC job, and the helpers that do not."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import shutil
import sys
from pathlib import Path

from ..config import RunConfig, load_user_task_class
from ..task import Task

_INSTALLED = {"flare_sparse", *sys.stdlib_module_names}


def list_user_modules(config: RunConfig, file: Path) -> tuple[Path, ...]:
    """Return the source file of the user task; empty for a task of this package."""
    user_task_class = load_user_task_class(config, file.parent)
    return (Path(inspect.getfile(user_task_class)),) if user_task_class else ()


def copy_user_module(user_task_class: type[Task] | None, out: Path) -> None:
    """Copy the user task's source file into the result folder, so that the model can be loaded from there later."""
    if user_task_class is not None and (source := Path(inspect.getfile(user_task_class))).parent != out:
        shutil.copy2(source, out / source.name)


def list_helper_modules(user_task_class: type[Task]) -> list[Path]:
    """Return the files of the user's other modules that a user task's file imports; they do not travel with a job.

    A helper lies in the folder of the task's file or below it, and is not installed.
    """
    file = Path(inspect.getfile(user_task_class)).resolve()
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    origins = {_find_origin(name) for name in names if name.partition(".")[0] not in _INSTALLED}
    helpers = {origin for origin in origins if origin is not None and origin.is_relative_to(file.parent)}
    return sorted(path for path in helpers if path != file and "site-packages" not in path.parts)


def _find_origin(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    # A module may be missing where an import is optional.
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec and spec.origin else None
