"""The user's own classes: methods and tasks, imported by the dotted paths that a configuration gives.

The user's own code in a job: its task or training script is built, and its source files are listed.
"""

import ast
from pathlib import Path
from typing import Any

from torch import nn

from ..core.errors import ConfigError, UntrustedCode, describe_exception, find_user_line
from ..methods.method import Method, MethodConfig
from ..tasks.bundles.task import BundleConfig, BundleTask
from ..tasks.script import ScriptConfig, ScriptTask
from ..tasks.task import Metric, Task, TaskConfig
from .schema import JobConfig, build_task
from .user_code import CODE_FOLDER, collect_user_code, import_user_module

_BASES: dict[str, tuple[type[Any], type[Any], str]] = {
    "method": (Method, MethodConfig, "docs/new-method.md"),
    "task": (Task, TaskConfig, "docs/own-task.md"),
}
"""Base of the user's classes and of their settings, by section, and the page that tells how to write one."""


def import_class(section: str, dotted: str, folder: Path | None = None) -> type[Any]:
    """Import a method or a task of the user's from its dotted path.

    For the lead only. Sites build such classes with FLARE's component builder, which consults the site's policy.

    Args:
        section: ``"method"`` or ``"task"``.
        dotted: ``module.Class``.
        folder: folder to search in addition to ``sys.path``: that of a configuration, or a result folder.

    Raises:
        ConfigError: there is no such module or class, the module cannot be executed, or the class is not a complete
            subclass of Method or Task.
    """
    field, (base, settings, page) = f"{section}.class", _BASES[section]
    found = import_user_class(field, dotted, list_code_folders(folder))
    if not (isinstance(found, type) and issubclass(found, base)):
        expected = f"flare_sparse.{base.__module__.split('.')[1]}.{base.__name__}"
        raise ConfigError(f"{field}: {dotted!r} is {found!r}; expected a subclass of {expected} ({page})")
    if missing := _list_missing_members(found):
        raise ConfigError(f"{field}: {dotted!r} does not define {', '.join(missing)} ({page})")
    config = getattr(found, "Config", None)
    if not (isinstance(config, type) and issubclass(config, settings)):
        raise ConfigError(
            f"{field}: {dotted!r} has Config {config!r}; expected a subclass of {settings.__name__} ({page})"
        )
    return found


def list_code_folders(folder: Path | None) -> list[Path]:
    """Return the folders that may hold the user's modules: that of a configuration, and the code of a finished run."""
    return [] if folder is None else [folder, folder / CODE_FOLDER]


def import_user_class(field: str, dotted: str, folders: list[Path]) -> Any:
    """Import a class of the user's.

    Raises:
        ConfigError: there is no such module or class, or the module cannot be executed.
    """
    module, _, name = dotted.rpartition(".")
    if module == "__main__":
        raise ConfigError(
            f"{field}: {dotted!r} is defined in a notebook or an interactive session, which FLARE cannot import. "
            "Start the notebook's cell with the line %%writefile my_module.py, which writes it to a file beside "
            f"the configuration, and set {field} to my_module.{name}"
        )
    try:
        return getattr(import_user_module(module, folders), name)
    except UntrustedCode:
        raise
    # The module is the user's: executing it may raise anything.
    except Exception as error:
        raise ConfigError(f"{field}: {dotted!r} cannot be imported: {_explain_import_error(error, module)}") from error


def _list_missing_members(kind: Any) -> list[str]:
    """Return the members that a user's class still has to define, such as ``loss()``."""
    missing = [f"{name}()" for name in sorted(kind.__abstractmethods__)]
    if issubclass(kind, Task) and not isinstance(getattr(kind, "metric", None), Metric):
        missing.append("metric, a flare_sparse.Metric")
    if issubclass(kind, Method) and not isinstance(getattr(kind, "name", None), str):
        missing.append("name, a text")
    return missing


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


def load_task(config: JobConfig, folder: Path) -> Task:
    """Build the task of a job; ``folder`` holds the configuration and possibly the user's own modules.

    Raises:
        ConfigError: the network of a training script cannot be built.
    """
    if config.task.key == "script":
        return _load_script_task(config, folder)
    settings = config.task.config
    if isinstance(settings, BundleConfig) and settings.code:
        folders = [*settings.list_folders(), *list_code_folders(folder)]
        classes = [import_user_class("task.bundle", name, folders) for name in settings.code]
        return BundleTask(settings, **{f"class_{index}": kind for index, kind in enumerate(classes)})
    return build_task(config)


def find_script(config: JobConfig, folder: Path) -> Path:
    """Return the file of a job's training script, relative to the folder of the configuration.

    Raises:
        ConfigError: there is no such file, or it is no Python.
    """
    for base in list_code_folders(folder):
        for file in (base / config.task.name, base / Path(config.task.name).name):
            if file.is_file():
                try:
                    ast.parse(file.read_text(encoding="utf-8"), str(file))
                except (SyntaxError, UnicodeDecodeError) as error:
                    line = getattr(error, "lineno", "?")
                    raise ConfigError(f"task.script: {file}:{line}: {error}") from error
                return file.resolve()
    raise ConfigError(
        f"task.script: there is no file {config.task.name} in {folder}; give its path relative to the configuration"
    )


def list_user_code(config: JobConfig, folder: Path) -> tuple[Path, ...]:
    """Return the user's files and packages that a job needs: of method, task or script, and all that these import.

    Args:
        config: settings of the job.
        folder: folder of the configuration, which holds the user's code beside the rest of ``sys.path``.

    Raises:
        ConfigError: the script is not found.
    """
    folders, files = list_code_folders(folder), []
    modules = [choice.name.rpartition(".")[0] for choice in (config.method, config.task) if choice.key == "class"]
    if config.task.key == "script":
        files = [find_script(config, folder)]
        assert isinstance(config.task.config, ScriptConfig), "the schema gave these settings to a script"
        folders, modules = [files[0].parent, *folders], [*modules, config.task.config.model.rpartition(".")[0]]
    settings = config.task.config
    if isinstance(settings, BundleConfig):
        folders = [*settings.list_folders(), *folders]
        modules += [name.rpartition(".")[0] for name in settings.code]
    further = [found for module in modules for found in _find_further_folder(module, folders)]
    code = collect_user_code([*folders, *further], modules=modules, files=files)
    return (*files, *(path for path in code.values() if path.resolve() not in files))


def _find_further_folder(module: str, folders: list[Path]) -> list[Path]:
    """Return the folder of a user's module as a list of one; empty if it is installed, or in one of ``folders``."""
    try:
        found = import_user_module(module, folders)
    # Imported for its location only: the error is raised where its class is needed.
    except Exception:  # noqa: BLE001
        return []
    if not (file := getattr(found, "__file__", None)):
        return []
    source = Path(file).resolve().parents[module.count(".") + (Path(file).name == "__init__.py")]
    # What pip has installed does not travel with a job.
    is_known = source.name in ("site-packages", "dist-packages") or source in [folder.resolve() for folder in folders]
    return [] if is_known else [source]


def _load_script_task(config: JobConfig, folder: Path) -> ScriptTask:
    settings = config.task.config
    assert isinstance(settings, ScriptConfig), "the schema gave these settings to a script"
    script_folder = (folder / config.task.name).parent
    network = import_user_class("task.model", settings.model, [script_folder, *list_code_folders(folder)])
    if not (isinstance(network, type) and issubclass(network, nn.Module)):
        raise ConfigError(
            f"task.model: {settings.model!r} is {network!r}; expected a class of torch networks, "
            "from which server and sites build theirs; call peft.get_peft_model and the like in its __init__"
        )
    try:
        model = network(**settings.model_args)
    # The class is the user's: building it may raise anything.
    except Exception as error:
        given = f"task.model_args {settings.model_args}"
        raise ConfigError(f"task.model: {settings.model} with {given}: {describe_exception(error)}") from error
    if type(model) is not network:
        raise ConfigError(
            f"task.model: {settings.model}() is a {type(model).__name__}; expected a network of the class"
        )
    return ScriptTask(config.task.name, settings, model)
