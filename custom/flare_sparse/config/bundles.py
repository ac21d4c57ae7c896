"""``task: {bundle: DIR}``: the configurations of a MONAI bundle become the settings of the task ``bundle``.

A job thus carries all of a bundle that its sites need, as plain settings: no file and no code. ``task.override``
replaces items of the training configuration by their ids, as ``--override`` of ``monai.bundle run`` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import ConfigError, suggest
from ..tasks.bundles.declaration import TRAIN, encode_json, find_training_file, read_declaration
from ..tasks.bundles.task import FILE_NAME
from .choice import KEYS, find_conflict
from .yaml_files import parse_yaml, read_settings


def insert_bundle(data: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``task.bundle`` by the content of the bundle; return settings without it as they are.

    Optimiser, learning rate and batch size of the bundle become ``method.training``, where that does not set them.

    Args:
        data: settings of a configuration, with an absolute path of the bundle.

    Raises:
        ConfigError: the bundle cannot be read or used; the text names the file and the item.
    """
    task = data.get("task")
    if not isinstance(task, Mapping) or "bundle" not in task:
        return dict(data)
    if conflict := find_conflict(("bundle", *KEYS["task"]), task):
        raise ConfigError(f"task: {conflict}")
    folder = Path(str(task["bundle"]))
    configs = _read_folder(folder)
    name = find_training_file(configs)
    override_items(configs[name], task.get("override", {}))
    settings = {key: value for key, value in task.items() if key not in ("bundle", "override")}
    result = {**data, "task": {"name": "bundle", **settings, "configs": configs}}
    method = data.get("method")
    training = method.get("training", {}) if isinstance(method, Mapping) else None
    # Malformed sections are left to the schema.
    is_method = isinstance(method, Mapping) and isinstance(training, Mapping)
    wanted = {"batch_size", "optimizer"} - set(training or ()) if is_method else ()
    _, declared = read_declaration(configs[name], str(folder / "configs" / name), training=wanted)
    if isinstance(method, Mapping) and isinstance(training, Mapping):
        result["method"] = {**method, "training": {**declared, **training}}
    return result


def override_items(content: dict[str, Any], items: Any) -> None:
    """Set items of a training configuration in place, by ids such as ``train::dataloader::batch_size``.

    Raises:
        ConfigError: an item has nothing to stand in.
    """
    if not isinstance(items, Mapping):
        raise ConfigError(f"task.override: expected a section of items by their ids, found {items!r}")
    for name, value in items.items():
        section: Any = content
        *parents, last = re.split("::|#", str(name))
        try:
            for part in parents:
                section = section[int(part) if isinstance(section, list) else part]
            section[int(last) if isinstance(section, list) else last] = value
        except (LookupError, ValueError, TypeError) as error:
            raise ConfigError(
                f"task.override: the bundle has no item {name}; expected ids such as train::dataloader::batch_size"
            ) from error


def _read_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the content of the JSON and YAML files in ``configs/``, by name; any other file stays where it is.

    Raises:
        ConfigError: there is no such folder, or a file is malformed.
    """
    configs = folder / "configs"
    if not configs.is_dir():
        siblings = [path.name for path in folder.parent.glob("*/")]
        raise ConfigError(
            f"task.bundle: {folder}: expected the folder of a MONAI bundle, with configs/train.json."
            f"{suggest(folder.name, siblings)}"
        )
    files = sorted(path for path in configs.iterdir() if re.fullmatch(FILE_NAME, path.name) and path.is_file())
    contents = {file.name: _read_file(file) for file in files}
    # Lists, such as those of cases, declare nothing.
    return {name: content for name, content in contents.items() if isinstance(content, dict)}


def _read_file(file: Path) -> dict[str, Any] | list[Any]:
    try:
        text = read_settings(file)
        content = json.loads(text) if file.suffix == ".json" else parse_yaml(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read as {file.suffix[1:].upper()}: {error}") from error
    if not isinstance(content, dict) and (file.stem == TRAIN or not isinstance(content, list)):
        raise ConfigError(f"{file}: expected a section of items, found {type(content).__name__}")
    if isinstance(content, dict):
        encode_json(content, str(file))
    return content
