"""Let jobs of this package run at a site without letting any code in: one line more in the site's allow-list.

FLARE builds only classes of a job that ``class_allow_list`` in the site's ``local/resources.json`` names, and a list
given there replaces FLARE's default list. So the prefix is added to the list that is in force, never put in its place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from ...errors import ConfigError

PREFIX = "flare_sparse.flare."
"""Only what lies below may be built from a job; nothing there takes an import string or a path."""
LIST, MODE = "class_allow_list", "class_list_enforcement_mode"
RESOURCES = "resources.json"


def local_folder(kit: Path) -> Path:
    """The ``local`` folder of a startup kit, or the folder itself when it is one.

    Raises:
        ConfigError: it is neither.
    """
    for folder in (kit / "local", kit):
        if folder.name == "local" and folder.is_dir():
            return folder
    raise ConfigError(
        f"{kit}: no startup kit: there is no folder 'local' in it. Give the folder that holds startup/ and local/"
    )


def read_resources(local: Path) -> dict[str, Any]:
    """The site's resources in force: ``resources.json``, else ``resources.json.default``, else nothing.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    for name in (RESOURCES, f"{RESOURCES}.default"):
        file = local / name
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
            if not isinstance(content, dict):
                raise ConfigError(f"{file}: expected a JSON object, found {type(content).__name__}")
            return content
    return {"format_version": 2}


def allowed(resources: dict[str, Any]) -> list[str]:
    """The class path prefixes in force.

    Raises:
        ConfigError: the list is malformed.
    """
    listed = resources.get(LIST, list(DEFAULT_CLASS_ALLOW_LIST))
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise ConfigError(f"{LIST}: expected a list of class paths, found {str(listed)[:80]}; correct resources.json")
    return listed


def allow(kit: Path, prefixes: Sequence[str] = (PREFIX,)) -> list[str]:
    """Add prefixes to the allow-list in a startup kit's ``local/resources.json``; everything else in it stays.

    Args:
        kit: the startup kit, or its ``local`` folder.
        prefixes: class paths; one that ends with a dot allows all below it.

    Returns:
        The prefixes that were not allowed before; the file is written only when there are some.

    Raises:
        ConfigError: there is no such folder, or its resources are malformed.
    """
    local = local_folder(kit)
    resources = read_resources(local)
    listed = allowed(resources)
    new = [prefix for prefix in prefixes if prefix not in listed and "*" not in listed]
    if new:
        changed = {**resources, MODE: resources.get(MODE, "enforce"), LIST: [*listed, *new]}
        part = local / f"{RESOURCES}.part"
        part.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
        part.replace(local / RESOURCES)
    return new
