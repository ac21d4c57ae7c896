"""The user's own task or training script: its classes are imported, and its source files listed, from a folder."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..core.errors import ConfigError, describe_exception, find_user_line
from ..tasks.script import ScriptConfig, ScriptTask
from ..tasks.task import Metric, Task
from .schema import JobConfig, build_task
from .user_code import collect_user_code, find_source_folder, import_user_module, is_installed

CODE_FOLDER = "code"
"""Folder in a result folder that holds the user's own code."""


def import_task_class(dotted: str, folder: Path | None = None) -> type[Task]:
    """Import a user task from its dotted path.

    For the command line only. Sites build user tasks with FLARE's component builder, which consults the site's policy.

    Args:
        dotted: ``module.Class``.
        folder: folder to search in addition to ``sys.path``: that of a configuration, or a result folder.

    Raises:
        ConfigError: there is no such module or class, the module cannot be executed, or the class is not a complete
            subclass of Task.
    """
    task_class = _import_class("task.class", dotted, _list_folders(folder))
    if not (isinstance(task_class, type) and issubclass(task_class, Task)):
        raise ConfigError(
            f"task.class: {dotted!r} is {task_class!r}; expected a subclass of flare_sparse.tasks.task.Task"
        )
    if missing := _list_missing_members(task_class):
        raise ConfigError(f"task.class: {dotted!r} does not define {', '.join(missing)} (docs/own-task.md)")
    return task_class


def load_task(config: JobConfig, folder: Path) -> Task:
    """Build the task of a job; ``folder`` holds the configuration and possibly the user's own modules.

    Raises:
        ConfigError: as :func:`import_task_class`; or the network of a training script cannot be built.
    """
    if config.task.key == "class":
        return build_task(config, import_task_class(config.task.name, folder))
    if config.task.key == "script":
        return _load_script_task(config, folder)
    return build_task(config)


def find_script(config: JobConfig, folder: Path) -> Path:
    """Return the file of a job's training script, relative to the folder of the configuration.

    Raises:
        ConfigError: there is no such file, or it is no Python.
    """
    for base in _list_folders(folder):
        for file in (base / config.task.name, base / Path(config.task.name).name):
            if file.is_file():
                _check_syntax(file)
                return file.resolve()
    raise ConfigError(
        f"task.script: there is no file {config.task.name} in {folder}; give its path relative to the configuration"
    )


def list_user_code(config: JobConfig, folder: Path) -> tuple[Path, ...]:
    """Return the user's files and packages that a job needs: of its task, or its script, and all that these import.

    Args:
        config: settings of the job.
        folder: folder of the configuration, which holds the user's code beside the rest of ``sys.path``.

    Raises:
        ConfigError: the task or the script is not found.
    """
    if config.task.key == "name":
        return ()
    folders = _list_folders(folder)
    if config.task.key == "script":
        script = find_script(config, folder)
        assert isinstance(config.task.config, ScriptConfig), "the schema gave these settings to a script"
        folders, module = [script.parent, *folders], config.task.config.model.rpartition(".")[0]
        code = collect_user_code([*folders, *_find_further_folder(module, folders)], modules=[module], files=[script])
        return (script, *(path for path in code.values() if path.resolve() != script))
    module = config.task.name.rpartition(".")[0]
    import_task_class(config.task.name, folder)
    return tuple(collect_user_code([*folders, *_find_further_folder(module, folders)], modules=[module]).values())


def _find_further_folder(module: str, folders: list[Path]) -> list[Path]:
    """Return the folder of a user's module as a list of one; empty if it is installed, or in one of ``folders``."""
    try:
        source = find_source_folder(import_user_module(module, folders))
    # Imported for its location only: the error is raised where its class is needed.
    except Exception:  # noqa: BLE001
        return []
    if source is None or is_installed(source) or source in [folder.resolve() for folder in folders]:
        return []
    return [source]


def _load_script_task(config: JobConfig, folder: Path) -> ScriptTask:
    settings = config.task.config
    assert isinstance(settings, ScriptConfig), "the schema gave these settings to a script"
    script_folder = (folder / config.task.name).parent
    network = _import_class("task.model", settings.model, [script_folder, *_list_folders(folder)])
    if not (isinstance(network, type) and issubclass(network, nn.Module)):
        raise ConfigError(f"task.model: {settings.model!r} is {network!r}; expected a class of torch networks")
    try:
        model = network(**settings.model_args)
    # The class is the user's: building it may raise anything.
    except Exception as error:
        given = f"task.model_args {settings.model_args}"
        raise ConfigError(f"task.model: {settings.model} with {given}: {describe_exception(error)}") from error
    return ScriptTask(config.task.name, settings, model)


def _list_folders(folder: Path | None) -> list[Path]:
    """Return the folders that may hold the user's modules: that of a configuration, and the code of a finished run."""
    return [] if folder is None else [folder, folder / CODE_FOLDER]


def _import_class(field: str, dotted: str, folders: list[Path]) -> Any:
    """Import a class of the user's.

    Raises:
        ConfigError: there is no such module or class, or the module cannot be executed.
    """
    module, _, name = dotted.rpartition(".")
    if module == "__main__":
        raise ConfigError(
            f"{field}: {dotted!r} is defined in a notebook or an interactive session, which FLARE cannot import. "
            "Start the notebook's cell with the line %%writefile my_tasks.py, which writes it to a file beside "
            f"the configuration, and set {field} to my_tasks.{name}"
        )
    try:
        imported: ModuleType = import_user_module(module, folders)
        return getattr(imported, name)
    # The module is the user's: executing it may raise anything.
    except Exception as error:
        raise ConfigError(f"{field}: {dotted!r} cannot be imported: {_explain_import_error(error, module)}") from error


def _explain_import_error(error: Exception, module: str) -> str:
    """Return why a user's module cannot be imported, and the remedy."""
    if isinstance(error, ModuleNotFoundError) and error.name and not f"{module}.".startswith(f"{error.name}."):
        return (
            f"{module} imports {error.name!r}, which is not found\n  {_locate(error)}\n"
            f"Put {error.name.partition('.')[0]}.py beside the configuration file, and it travels with the job; or "
            f"install {error.name!r} here, at the server and at every site (docs/own-task.md, On real sites)"
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
    return methods if is_metric else [*methods, "metric, a flare_sparse.tasks.task.Metric"]


def _check_syntax(script: Path) -> None:
    """Raises:
    ConfigError: the script is no Python.
    """
    try:
        ast.parse(script.read_text(encoding="utf-8"), str(script))
    except (SyntaxError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", "?")
        raise ConfigError(f"task.script: {script}:{line}: {error}") from error
