"""Configuration: reads a YAML file and overrides into one validated value, or reports all errors at once.

A file has the sections of :class:`RunConfig`. The part sent to the sites is its :class:`JobConfig`, as a plain JSON
dictionary (:func:`serialize_job`), which each site validates again (:func:`parse_job`).

Methods and tasks of other distributions, which name them as entry points ``flare_sparse.methods`` and ``.tasks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ..core.errors import ConfigError, suggest
from ..core.params import Layout
from ..methods.method import Method
from ..methods.pooled_statistics import pool_statistics
from ..methods.registry import METHODS
from ..tasks.data.partition import PARTITIONS
from ..tasks.registry import TASKS
from ..tasks.script import ScriptTask
from ..tasks.task import Task, TaskConfig
from ..wire.formats import FORMATS, uncompress
from .bundles import insert_bundle
from .choice import KEYS, Registries, find_conflict, find_name, get_settings
from .problems import describe_problems
from .schema import JobConfig, RunConfig
from .user_classes import import_class
from .yaml_files import apply_overrides, find_value, format_yaml, read_yaml, set_value

BUILT_IN: Mapping[str, Mapping[str, type[Any]]] = {"method": METHODS, "task": TASKS}
"""The package's own entries, by section of a configuration."""


def list_plugins(section: str) -> list[tuple[str, str, str]]:
    """Return name, class and distribution of the installed plugins of a section; none is imported.

    Args:
        section: ``"method"`` or ``"task"``.
    """
    return sorted(
        (
            plugin.name,
            plugin.value.replace(":", ".").replace(" ", ""),
            f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else "an unknown distribution",
        )
        for plugin in entry_points(group=f"flare_sparse.{section}s")
    )


def find_plugin(section: str, name: str) -> str | None:
    """Return the class of the plugin of a name, ``module.Class``; None if there is none.

    Raises:
        ConfigError: the package, or another distribution, has the same name.
    """
    found = [(path, owner) for plugin, path, owner in list_plugins(section) if plugin == name]
    owners = [f"{owner} ({path})" for path, owner in dict.fromkeys(found)]
    if found and name in BUILT_IN[section]:
        owners.insert(0, "flare-sparse itself")
    if len(owners) > 1:
        raise ConfigError(
            f"{section}.name: {name!r} is the name of {len(owners)} {section}s, of {' and '.join(owners)}; name one by "
            f"its class, {section}: {{class: {found[-1][0]}}}, or uninstall the other distribution"
        )
    return found[0][0] if found else None


def load_entry(section: str, name: str, folder: Path) -> type[Any]:
    """Return the class of a method or a task: of the package, a plugin, or the user's own.

    Args:
        section: ``"method"`` or ``"task"``.
        name: a name, or ``module.Class``.
        folder: folder to search for the user's modules.

    Raises:
        ConfigError: there is none, it cannot be imported, or its name is that of two.
    """
    plugin = find_plugin(section, name)
    if name in BUILT_IN[section]:
        return BUILT_IN[section][name]
    path = plugin or name
    if "." in path:
        return import_class(section, path, folder)
    names = sorted({*BUILT_IN[section], *(plugin for plugin, *_ in list_plugins(section))})
    raise ConfigError(
        f"there is no {section} {name!r}; expected one of {', '.join(names)}, or module.Class for a {section} of your "
        f"own.{suggest(name, names)}"
    )


def resolve_classes(data: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, type[Any]]]:
    """Return a configuration whose plugins are named by their classes, and the classes that are not the package's.

    A site decides by the class, not by a name that another distribution may have, too. A dotted name is a class.

    Args:
        data: the settings.
        folder: folder that may hold the user's modules.

    Returns:
        The settings, and the imported classes by section: ``method``, ``task``.

    Raises:
        ConfigError: as :func:`find_plugin`; or a class cannot be imported, or is no complete method or task.
    """
    named, classes = dict(data), dict[str, type[Any]]()
    for section in BUILT_IN:
        key, name = find_name(section, data.get(section))
        # The schema says what is wrong with a section of two names.
        if not isinstance(name, str) or find_conflict(KEYS[section], data[section]):
            continue
        plugin = find_plugin(section, name) if key == "name" else None
        if plugin or (key == "name" and "." in name):
            settings = {field: value for field, value in data[section].items() if field != key}
            key, name = "class", plugin or name
            named[section] = {key: name, **settings}
        if key != "name":
            classes[section] = ScriptTask if key == "script" else import_class(section, name, folder)
    return named, classes


J = TypeVar("J", bound=JobConfig)
_METHODS = ("method.name=", "method.class=")


def load_config(
    path: str | Path, overrides: Sequence[str] = (), classes: Mapping[str, type[Any]] | None = None
) -> RunConfig:
    """Load and validate the configuration in a file.

    Args:
        path: YAML file; a relative path in its sections ``task`` and ``simulator.data`` refers to the file's folder.
        overrides: assignments ``key.path=value`` with the value in YAML; a relative path among them refers to the
            working directory.
        classes: the user's classes by section, as of :func:`resolve_classes`; None: those that the file names are
            imported.

    Raises:
        ConfigError: the text lists every error with the field's path, the value found and the values allowed.
    """
    file = Path(path)
    data = _resolve_paths(read_yaml(file), file.parent)
    known = _list_method_settings(overrides, file.parent)
    if known is not None and isinstance(section := data.get("method"), dict):
        # Settings that the method of an override lacks, as in method.name=fedavg.
        data["method"] = {key: value for key, value in section.items() if key in known}
    data = apply_overrides(data, overrides)
    data = _locate_script_data(data, file.parent)
    data = insert_bundle(_resolve_paths(data, Path.cwd()))
    if classes is None:
        data, classes = resolve_classes(data, file.parent)
    registries = _build_registries(data, classes)
    return _validate(RunConfig, _read_files(data, registries["task"], file), registries, str(file))


def keep_known_settings(overrides: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the overrides without the settings of ``method`` that the method which they name lacks.

    >>> keep_known_settings(["method.name=fedavg", "method.sparsity=0.9", "method.rounds=5"], Path())
    ('method.name=fedavg', 'method.rounds=5')
    """
    known = _list_method_settings(overrides, folder)
    if known is None:
        return tuple(overrides)
    keys = [text.partition("=")[0].split(".") for text in overrides]
    return tuple(
        t
        for t, key in zip(overrides, keys, strict=True)
        if key[:1] != ["method"] or key[1:2] in ([], ["name"]) or key[1] in known
    )


def _list_method_settings(overrides: Sequence[str], folder: Path) -> set[str] | None:
    """Return the settings of the method that overrides name, with the key that names it; None if they name none."""
    named = [text for text in overrides if text.startswith(_METHODS)]
    if not named:
        return None
    key, _, name = named[-1].partition("=")
    # The schema says what is wrong with a name that nothing has.
    if key == "method.name" and "." not in name and name not in METHODS and not find_plugin("method", name):
        return None
    return {key.removeprefix("method."), *load_entry("method", name, folder).Config.model_fields}


def parse_job(
    data: Mapping[str, Any], task: type[Task] | None = None, method: type[Method[Any, Any]] | None = None
) -> JobConfig:
    """Validate the configuration that came with a job.

    Args:
        data: dictionary from :func:`serialize_job`.
        task: class of the task if ``task.class`` or ``task.script`` is set. This function never imports a dotted path,
            because the job comes from outside the site.
        method: class of the method if ``method.class`` is set.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    return _validate(JobConfig, data, _build_registries(data, {"task": task, "method": method}), "job")


def serialize_job(config: JobConfig) -> dict[str, Any]:
    """Return the part of a configuration that is sent with a job, as plain JSON values; never ``simulator``."""
    return config.model_dump(mode="json", include=set(JobConfig.model_fields))


def dump_config(config: JobConfig) -> str:
    """Return the resolved configuration as YAML; :func:`load_config` reads the same value back."""
    return format_yaml(config.model_dump(mode="json"))


def build_method(config: JobConfig, layout: Layout) -> Method[Any, Any]:
    """Build the method of a job for a model of this layout."""
    values = FORMATS[config.wire.values]
    settings = config.method.config.fit(layout, FORMATS[uncompress(config.wire.values)])
    method: Method[Any, Any] = config.method.entry(settings, layout, config.seed)
    return pool_statistics(method, short=config.builds_initial and values.sends_differences)


def _build_registries(data: Mapping[str, Any], classes: Mapping[str, type[Any] | None]) -> Registries:
    """Return what the sections of a configuration may select: the package's own entries and the user's class."""
    registries = {**BUILT_IN, "partition": PARTITIONS}
    for section, entry in classes.items():
        key, name = find_name(section, data.get(section))
        if entry is not None and key != "name" and isinstance(name, str):
            # Alone: a name of the package is no class, nor the other way round.
            registries[section] = {name: entry}
    return registries


def _validate(model: type[J], data: Mapping[str, Any], registries: Registries, source: str) -> J:
    try:
        return model.model_validate(data, context=registries)
    except ValidationError as error:
        problems = describe_problems(error, model, data, registries)
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        lines = "\n".join(f"  {problem}" for problem in problems)
        remedy = "Correct the file, or override a setting with --set KEY.PATH=VALUE."
        raise ConfigError(f"{source}: {count}, nothing was started.\n{lines}\n{remedy}") from error


def _locate_script_data(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Add the location of data that a training script finds by itself: the folder of the configuration."""
    task, simulator = data.get("task"), data.get("simulator")
    if not (isinstance(task, dict) and "script" in task and isinstance(simulator, dict) and "data" not in simulator):
        return data
    shared = {"path": str(base.absolute()), "partition": {"kind": "shared"}}
    return {**data, "simulator": {**simulator, "data": shared}}


def _read_files(data: dict[str, Any], tasks: Mapping[str, type[Any]], file: Path) -> dict[str, Any]:
    """Replace files that the section ``task`` names by their content, as its task does.

    Raises:
        ConfigError: a file cannot be read.
    """
    section = data.get("task")
    task = tasks.get(str(find_name("task", section)[1]))
    settings = None if task is None else get_settings(task)
    if not isinstance(section, dict) or settings is None or not issubclass(settings, TaskConfig):
        return data
    path = find_value(data, ("simulator", "data", "path"))
    try:
        return {**data, "task": settings.read_files(section, path if isinstance(path, str) else None)}
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _resolve_paths(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make ``simulator.data.path`` and the files and folders of the section ``task`` absolute, relative to ``base``."""
    for keys in (("simulator", "data", "path"), ("task", "bundle"), ("task", "header"), ("task", "plan")):
        # The schema says what is wrong with malformed sections.
        if isinstance(value := find_value(data, keys), str):
            data = set_value(data, keys, str((base / Path(value).expanduser()).absolute()))
    return data
