"""Configuration: a YAML file and overrides in, one checked value out, or every error at once.

A file has the sections of :class:`RunConfig`. The part that travels to the sites is its :class:`JobConfig`: a plain
JSON dictionary (:func:`job_to_dict`) that the other end checks again (:func:`parse_job`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from ..methods import METHODS, Method
from ..params import Layout
from ..task import Task
from ..tasks import TASKS
from .choice import Choice, Registries, select
from .problems import describe_problem
from .schema import JobConfig, RunConfig, methods, partitions, tasks
from .yaml_files import apply_overrides, find_non_finite, read_yaml

J = TypeVar("J", bound=JobConfig)

__all__ = [
    "Choice",
    "JobConfig",
    "RunConfig",
    "build_method",
    "build_task",
    "dump_config",
    "job_to_dict",
    "load_config",
    "own_class",
    "parse_job",
    "task_of",
    "user_task",
]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a file.

    Args:
        path: YAML file; ``simulator.data.path`` in it is relative to its folder.
        overrides: ``key.path=value``, the value in YAML; a path in it is relative to the working directory.

    Raises:
        ConfigError: everything that is wrong, each field with its path, what was given and what is allowed.
    """
    file = Path(path)
    data = _absolute(apply_overrides(_absolute(read_yaml(file), file.parent), overrides), Path.cwd())
    choices = dict(tasks())
    key, name = select("task", data.get("task"))
    if key == "class" and isinstance(name, str):
        choices[name] = import_task_class(name, file.parent).Config
    return _checked(RunConfig, data, choices, str(file))


def parse_job(data: Mapping[str, Any], task: type[Task] | None = None) -> JobConfig:
    """A job's part of a configuration, as it came with a job.

    Args:
        data: from :func:`job_to_dict`.
        task: the user's own class when ``task.class`` is given; a dotted path is never imported here.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    choices = dict(tasks())
    key, name = select("task", data.get("task"))
    if key == "class" and task is not None:
        choices[str(name)] = task.Config
    return _checked(JobConfig, data, choices, "job")


def job_to_dict(config: JobConfig) -> dict[str, Any]:
    """What travels in a job, as plain JSON values: never ``simulator``."""
    return config.model_dump(mode="json", include=set(JobConfig.model_fields))


def dump_config(config: JobConfig) -> str:
    """The resolved configuration as YAML; :func:`load_config` reads the same value back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def build_method(config: JobConfig, layout: Layout) -> Method[Any]:
    """The method of a job, for a model of this layout."""
    return METHODS[config.method.name](config.method.config, layout, config.seed)


def build_task(config: JobConfig, own: type[Task] | None = None) -> Task:
    """The task of a job; ``own`` is the user's class when ``task.class`` is given."""
    kind = TASKS[config.task.name] if own is None else own
    return kind(config.task.config)


def import_task_class(dotted: str, folder: Path | None = None) -> type[Task]:
    """Import a user's own task, ``module.Class``, also from ``folder``. For the command line only: sites build theirs
    through the framework's component builder, which asks the site's policy first.

    Raises:
        ConfigError: there is no such module or class, or the class is not a Task.
    """
    module, _, name = dotted.rpartition(".")
    if folder is not None and str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"task.class: {dotted!r} cannot be imported: {error}. Expected module.Class, with the module beside the "
            "configuration file or installed (docs/own-task.md)"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task.class: {dotted!r} is {found!r}; expected a subclass of flare_sparse.task.Task")
    return found


def load_user_task_class(config: JobConfig, folder: Path) -> type[Task] | None:
    """The class of the user's own task, as :func:`import_task_class`; None for a task of the package."""
    return import_task_class(config.task.name, folder) if config.task.key == "class" else None


def load_task(config: JobConfig, folder: Path) -> Task:
    """The task of a job whose configuration lies in ``folder``, where the module of a user's own may lie, too.

    Raises:
        ConfigError: as :func:`import_task_class`.
    """
    return build_task(config, load_user_task_class(config, folder))


def _checked(model: type[J], data: Mapping[str, Any], choices: Mapping[str, type[BaseModel]], source: str) -> J:
    entries: Registries = {"method": methods(), "task": choices, "partition": partitions()}
    problems = [f"{path}: expected a finite number" for path in find_non_finite(data)]
    try:
        checked = model.model_validate(data, context=entries)
    except ValidationError as error:
        problems += [describe_problem(e, model, data, entries) for e in error.errors(include_url=False)]
    if problems:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        listed = "\n".join(f"  {problem}" for problem in problems)
        remedy = "Correct the file, or give --set KEY.PATH=VALUE."
        raise ConfigError(f"{source}: {count}, nothing was started.\n{listed}\n{remedy}")
    return checked


def _absolute(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """``simulator.data.path`` relative to ``base`` made absolute; anything malformed is left for the schema."""
    simulator = data.get("simulator")
    source = simulator.get("data") if isinstance(simulator, dict) else None
    if not isinstance(simulator, dict) or not isinstance(source, dict) or not isinstance(source.get("path"), str):
        return data
    path = (base / Path(source["path"]).expanduser()).absolute()
    return {**data, "simulator": {**simulator, "data": {**source, "path": str(path)}}}
