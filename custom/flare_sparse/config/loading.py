"""Configuration: reads a YAML file and overrides into one validated value, or reports all errors at once.

A file has the sections of :class:`RunConfig`. The part sent to the sites is its :class:`JobConfig`, as a plain JSON
dictionary (:func:`serialize_job`), which each site validates again (:func:`parse_job`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..core.errors import ConfigError
from ..core.params import Layout
from ..methods.method import Method
from ..methods.registry import METHODS
from ..tasks.script import ScriptTask
from ..tasks.task import Task, TaskConfig
from .bundles import insert_bundle
from .choice import Registries, find_name
from .problems import describe_problem
from .schema import JobConfig, RunConfig, list_methods, list_partitions, list_tasks
from .user_tasks import import_task_class
from .yaml_files import apply_overrides, find_non_finite_settings, format_yaml, read_yaml

J = TypeVar("J", bound=JobConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load and validate the configuration in a file.

    Args:
        path: YAML file; a relative path in its sections ``task`` and ``simulator.data`` refers to the file's folder.
        overrides: assignments ``key.path=value`` with the value in YAML; a relative path among them refers to the
            working directory.

    Raises:
        ConfigError: the text lists every error with the field's path, the value found and the values allowed.
    """
    file = Path(path)
    data = _locate_script_data(apply_overrides(_resolve_paths(read_yaml(file), file.parent), overrides), file.parent)
    task_configs = dict(list_tasks())
    data = _read_files(insert_bundle(_resolve_paths(data, Path.cwd())), task_configs, file)
    key, name = find_name("task", data.get("task"))
    if key == "class" and isinstance(name, str):
        task_configs[name] = import_task_class(name, file.parent).Config
    elif key == "script" and isinstance(name, str):
        task_configs[name] = ScriptTask.Config
    return _validate(RunConfig, data, task_configs, str(file))


def parse_job(data: Mapping[str, Any], task: type[Task] | None = None) -> JobConfig:
    """Validate the configuration that came with a job.

    Args:
        data: dictionary from :func:`serialize_job`.
        task: class of the task if ``task.class`` or ``task.script`` is set. This function never imports a dotted path,
            because the job comes from outside the site.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    task_configs = dict(list_tasks())
    key, name = find_name("task", data.get("task"))
    if key != "name" and task is not None:
        task_configs[str(name)] = task.Config
    return _validate(JobConfig, data, task_configs, "job")


def serialize_job(config: JobConfig) -> dict[str, Any]:
    """Return the part of a configuration that is sent with a job, as plain JSON values; never ``simulator``."""
    return config.model_dump(mode="json", include=set(JobConfig.model_fields))


def dump_config(config: JobConfig) -> str:
    """Return the resolved configuration as YAML; :func:`load_config` reads the same value back."""
    return format_yaml(config.model_dump(mode="json"))


def build_method(config: JobConfig, layout: Layout) -> Method[Any, Any]:
    """Build the method of a job for a model of this layout."""
    return METHODS[config.method.name](config.method.config, layout, config.seed)


def _validate(model: type[J], data: Mapping[str, Any], task_configs: Mapping[str, type[BaseModel]], source: str) -> J:
    registries: Registries = {"method": list_methods(), "task": task_configs, "partition": list_partitions()}
    problems = [f"{path}: expected a finite number" for path in find_non_finite_settings(data)]
    try:
        config = model.model_validate(data, context=registries)
    except ValidationError as error:
        problems += [describe_problem(e, model, data, registries) for e in error.errors(include_url=False)]
    # Each alternative of a union fails by itself.
    problems = list(dict.fromkeys(problems))
    if problems:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        lines = "\n".join(f"  {problem}" for problem in problems)
        remedy = "Correct the file, or override a setting with --set KEY.PATH=VALUE."
        raise ConfigError(f"{source}: {count}, nothing was started.\n{lines}\n{remedy}")
    return config


def _locate_script_data(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Add the location of data that a training script finds by itself: the folder of the configuration."""
    task, simulator = data.get("task"), data.get("simulator")
    if not (isinstance(task, dict) and "script" in task and isinstance(simulator, dict) and "data" not in simulator):
        return data
    shared = {"path": str(base.absolute()), "partition": {"kind": "shared"}}
    return {**data, "simulator": {**simulator, "data": shared}}


def _read_files(data: dict[str, Any], tasks: Mapping[str, type[BaseModel]], file: Path) -> dict[str, Any]:
    """Replace files that the section ``task`` names by their content, as its task does.

    Raises:
        ConfigError: a file cannot be read.
    """
    section = data.get("task")
    task = tasks.get(str(section.get("name"))) if isinstance(section, dict) else None
    if not isinstance(section, dict) or task is None or not issubclass(task, TaskConfig):
        return data
    path = _find_data(data)
    try:
        return {**data, "task": task.read_files(section, path if isinstance(path, str) else None)}
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _find_data(data: Mapping[str, Any]) -> Any:
    """Return the path of the simulator's data; None without one."""
    located = data.get("simulator")
    for key in ("data", "path"):
        located = located.get(key) if isinstance(located, dict) else None
    return located


def _resolve_paths(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make ``simulator.data.path`` and the files and folders of the section ``task`` absolute, relative to ``base``."""
    for keys in (("simulator", "data", "path"), ("task", "bundle"), ("task", "header"), ("task", "plan")):
        data = _resolve_path(data, keys, base)
    return data


def _resolve_path(data: dict[str, Any], keys: Sequence[str], base: Path) -> dict[str, Any]:
    """Make the path at some keys absolute; leave malformed sections to the schema."""
    if not isinstance(data, dict) or keys[0] not in data:
        return data
    value = data[keys[0]]
    if len(keys) > 1:
        return {**data, keys[0]: _resolve_path(value, keys[1:], base)}
    return {**data, keys[0]: str((base / Path(value).expanduser()).absolute())} if isinstance(value, str) else data
