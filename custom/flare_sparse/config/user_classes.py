"""The user's own classes: methods and tasks, imported by the dotted paths that a configuration gives."""

from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, UntrustedCode, describe_exception, find_user_line
from ..methods.method import Method, MethodConfig
from ..tasks.task import Metric, Task, TaskConfig
from .user_code import CODE_FOLDER, import_user_module


def import_task_class(dotted: str, folder: Path | None = None) -> type[Task]:
    """Import a user task from its dotted path.

    For the lead only. Sites build user tasks with FLARE's component builder, which consults the site's policy.

    Args:
        dotted: ``module.Class``.
        folder: folder to search in addition to ``sys.path``: that of a configuration, or a result folder.

    Raises:
        ConfigError: there is no such module or class, the module cannot be executed, or the class is not a complete
            subclass of Task.
    """
    found: type[Task] = _import_subclass("task.class", dotted, folder, Task, TaskConfig, "docs/own-task.md")
    return found


def import_method_class(dotted: str, folder: Path | None = None) -> type[Method[Any, Any]]:
    """Import a user method from its dotted path, as :func:`import_task_class` does a task.

    Raises:
        ConfigError: as :func:`import_task_class`.
    """
    found: type[Method[Any, Any]]
    found = _import_subclass("method.class", dotted, folder, Method, MethodConfig, "docs/new-method.md")
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


def _import_subclass(field: str, dotted: str, folder: Path | None, base: Any, settings: Any, page: str) -> Any:
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
