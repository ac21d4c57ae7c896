"""Configuration: reads a YAML file and overrides into one validated value, or reports all errors at once.

A file has the sections of :class:`RunConfig`. The part sent to the sites is its :class:`JobConfig`, as a plain JSON
dictionary (:func:`serialize_job`), which each site validates again (:func:`parse_job`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, describe_exception, find_user_line
from ..methods import METHODS, Method
from ..params import Layout
from ..task import Metric, Task
from ..tasks import TASKS
from .choice import Choice, Registries, find_name
from .problems import describe_problem
from .schema import JobConfig, RunConfig, list_methods, list_partitions, list_tasks
from .yaml_files import apply_overrides, find_non_finite_settings, read_yaml

J = TypeVar("J", bound=JobConfig)

__all__ = [
    "Choice",
    "JobConfig",
    "RunConfig",
    "build_method",
    "build_task",
    "dump_config",
    "import_task_class",
    "load_config",
    "load_task",
    "load_user_task_class",
    "parse_job",
    "serialize_job",
]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load and validate the configuration in a file.

    Args:
        path: YAML file; a relative ``simulator.data.path`` in it refers to the file's folder.
        overrides: assignments ``key.path=value`` with the value in YAML; a relative ``simulator.data.path`` among them
            refers to the working directory.

    Raises:
        ConfigError: the text lists every error with the field's path, the value found and the values allowed.
    """
    file = Path(path)
    data = apply_overrides(_resolve_data_path(read_yaml(file), file.parent), overrides)
    data = _resolve_data_path(data, Path.cwd())
    task_configs = dict(list_tasks())
    key, name = find_name("task", data.get("task"))
    if key == "class" and isinstance(name, str):
        task_configs[name] = import_task_class(name, file.parent).Config
    return _validate(RunConfig, data, task_configs, str(file))


def parse_job(data: Mapping[str, Any], task: type[Task] | None = None) -> JobConfig:
    """Validate the configuration that came with a job.

    Args:
        data: dictionary from :func:`serialize_job`.
        task: class of the user task if ``task.class`` is set. This function never imports a dotted path, because the
            job comes from outside the site.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    task_configs = dict(list_tasks())
    key, name = find_name("task", data.get("task"))
    if key == "class" and task is not None:
        task_configs[str(name)] = task.Config
    return _validate(JobConfig, data, task_configs, "job")


def serialize_job(config: JobConfig) -> dict[str, Any]:
    """Return the part of a configuration that is sent with a job, as plain JSON values; never ``simulator``."""
    return config.model_dump(mode="json", include=set(JobConfig.model_fields))


def dump_config(config: JobConfig) -> str:
    """Return the resolved configuration as YAML; :func:`load_config` reads the same value back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def build_method(config: JobConfig, layout: Layout) -> Method[Any, Any]:
    """Build the method of a job for a model of this layout."""
    return METHODS[config.method.name](config.method.config, layout, config.seed)


def build_task(config: JobConfig, user_task: type[Task] | None = None) -> Task:
    """Build the task of a job; ``user_task`` is the user's class if ``task.class`` is set."""
    task_class = TASKS[config.task.name] if user_task is None else user_task
    return task_class(config.task.config)


def import_task_class(dotted: str, folder: Path | None = None) -> type[Task]:
    """Import a user task from its dotted path.

    For the command line only. Sites build user tasks with FLARE's component builder, which consults the site's policy.

    Args:
        dotted: ``module.Class``.
        folder: folder to search in addition to ``sys.path``.

    Raises:
        ConfigError: there is no such module or class, the module cannot be executed, or the class is not a complete
            subclass of Task.
    """
    module, _, name = dotted.rpartition(".")
    if module == "__main__":
        raise ConfigError(
            f"task.class: {dotted!r} is defined in a notebook or an interactive session, which FLARE cannot import. "
            "Start the notebook's cell with the line %%writefile my_tasks.py, which writes it to a file beside "
            f"the configuration, and set task.class to my_tasks.{name}"
        )
    if folder is not None and str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))
    try:
        task_class = getattr(importlib.import_module(module), name)
    # The module is the user's: executing it may raise anything.
    except Exception as error:
        raise ConfigError(
            f"task.class: {dotted!r} cannot be imported: {_explain_import_error(error, module)}"
        ) from error
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        raise ConfigError(f"task.class: {dotted!r} is {task_class!r}; expected a subclass of flare_sparse.task.Task")
    if missing := _list_missing_members(task_class):
        raise ConfigError(f"task.class: {dotted!r} does not define {', '.join(missing)} (docs/own-task.md)")
    return task_class


def _explain_import_error(error: Exception, module: str) -> str:
    """Return why a user task's module cannot be imported, and the remedy."""
    if isinstance(error, ModuleNotFoundError) and error.name and not f"{module}.".startswith(f"{error.name}."):
        return (
            f"{module} imports {error.name!r}, which is not found\n  {_locate(error)}\n"
            f"Install {error.name!r}, or put {error.name.partition('.')[0]}.py beside the configuration file. A job "
            f"carries the file of {module} only: install {error.name!r} at the server and at every site, too, or "
            f"move its code into {module} (docs/own-task.md, On real sites)"
        )
    if isinstance(error, (ImportError, AttributeError, ValueError)) and find_user_line(error) is None:
        return (
            f"{error}. Expected module.Class; the module must be installed, or in the folder of the configuration file "
            "(docs/own-task.md)"
        )
    if isinstance(error, SyntaxError):
        return f"{error.msg}\n  at {error.filename}:{error.lineno}: {(error.text or '').strip()}"
    return describe_exception(error)


def _locate(error: Exception) -> str:
    frame = find_user_line(error)
    return f"at {frame.filename}:{frame.lineno}: {frame.line}" if frame else "(the line is not known)"


def _list_missing_members(task_class: type[Task]) -> list[str]:
    """Return the members that a task class still has to define, such as ``loss()``."""
    methods = [f"{name}()" for name in sorted(task_class.__abstractmethods__)]
    is_metric = isinstance(getattr(task_class, "metric", None), Metric)
    return methods if is_metric else [*methods, "metric, a flare_sparse.task.Metric"]


def load_user_task_class(config: JobConfig, folder: Path) -> type[Task] | None:
    """Import the user task of a job; None if the job uses a built-in task.

    Raises:
        ConfigError: as :func:`import_task_class`.
    """
    return import_task_class(config.task.name, folder) if config.task.key == "class" else None


def load_task(config: JobConfig, folder: Path) -> Task:
    """Build the task of a job; ``folder`` holds the configuration and possibly the module of a user task.

    Raises:
        ConfigError: as :func:`import_task_class`.
    """
    return build_task(config, load_user_task_class(config, folder))


def _validate(model: type[J], data: Mapping[str, Any], task_configs: Mapping[str, type[BaseModel]], source: str) -> J:
    registries: Registries = {"method": list_methods(), "task": task_configs, "partition": list_partitions()}
    problems = [f"{path}: expected a finite number" for path in find_non_finite_settings(data)]
    try:
        config = model.model_validate(data, context=registries)
    except ValidationError as error:
        problems += [describe_problem(e, model, data, registries) for e in error.errors(include_url=False)]
    if problems:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        lines = "\n".join(f"  {problem}" for problem in problems)
        remedy = "Correct the file, or override a setting with --set KEY.PATH=VALUE."
        raise ConfigError(f"{source}: {count}, nothing was started.\n{lines}\n{remedy}")
    return config


def _resolve_data_path(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make ``simulator.data.path`` absolute, relative to ``base``; leave malformed sections to the schema."""
    simulator = data.get("simulator")
    source = simulator.get("data") if isinstance(simulator, dict) else None
    if not isinstance(simulator, dict) or not isinstance(source, dict) or not isinstance(source.get("path"), str):
        return data
    path = (base / Path(source["path"]).expanduser()).absolute()
    return {**data, "simulator": {**simulator, "data": {**source, "path": str(path)}}}
