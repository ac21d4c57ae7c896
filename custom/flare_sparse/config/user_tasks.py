"""The user's own code in a job: its task or training script is built, and its source files are listed."""

import ast
from pathlib import Path

from torch import nn

from ..core.errors import ConfigError, describe_exception
from ..tasks.bundles.task import BundleConfig, BundleTask
from ..tasks.script import ScriptConfig, ScriptTask
from ..tasks.task import Task
from .schema import JobConfig, build_task
from .user_classes import import_user_class, list_code_folders
from .user_code import collect_user_code, find_source_folder, import_user_module, is_installed


def load_task(config: JobConfig, folder: Path) -> Task:
    """Build the task of a job; ``folder`` holds the configuration and possibly the user's own modules.

    Raises:
        ConfigError: the network of a training script cannot be built.
    """
    if config.task.key == "script":
        return _load_script_task(config, folder)
    settings = config.task.config
    if isinstance(settings, BundleConfig) and settings.code:
        folders = [*_list_bundle_folders(config), *list_code_folders(folder)]
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
                _check_syntax(file)
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
    if isinstance(config.task.config, BundleConfig):
        folders = [*_list_bundle_folders(config), *folders]
        modules += [name.rpartition(".")[0] for name in config.task.config.code]
    further = [found for module in modules for found in _find_further_folder(module, folders)]
    code = collect_user_code([*folders, *further], modules=modules, files=files)
    return (*files, *(path for path in code.values() if path.resolve() not in files))


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


def _list_bundle_folders(config: JobConfig) -> list[Path]:
    """Return the folder of a bundle's own code as a list of one; empty where the lead's folder is not at hand."""
    settings = config.task.config
    return [settings.folder] if isinstance(settings, BundleConfig) and settings.folder is not None else []


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


def _check_syntax(script: Path) -> None:
    """Refuse a script that is no Python.

    Raises:
        ConfigError: the script is no Python.
    """
    try:
        ast.parse(script.read_text(encoding="utf-8"), str(script))
    except (SyntaxError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", "?")
        raise ConfigError(f"task.script: {script}:{line}: {error}") from error
