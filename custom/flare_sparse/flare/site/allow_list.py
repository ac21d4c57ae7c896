"""Let jobs of this package run at a site without letting any code in: its classes, one by one, in the site's allow-list.

FLARE builds only classes of a job that ``class_allow_list`` in the site's ``local/resources.json`` names, and a list
given there replaces FLARE's default list. So ours are added to the list that is in force, never put in its place. FLARE
calls whatever a job's path leads to, functions and imported names too: a prefix would open all that a module holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from ...errors import ConfigError
from .kit_files import find_active_file, read_object, write_object

PACKAGE = "flare_sparse."
CLASSES = (
    "flare_sparse.flare.aggregator.StagingAggregator",
    "flare_sparse.flare.controller.FederatedController",
    "flare_sparse.flare.executor.SparseExecutor",
    "flare_sparse.flare.filters.DecodeRequest",
    "flare_sparse.flare.filters.DecodeUpdate",
    "flare_sparse.flare.filters.EncodeUpdate",
    "flare_sparse.flare.session.UserTask",
    "flare_sparse.flare.session.ServerSession",
    "flare_sparse.flare.session.SiteSession",
)
"""All of this package that a job may name; none of them takes an import string or a path."""
EVERYTHING = "*"
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
    file = find_active_file(local, RESOURCES)
    return {"format_version": 2} if file is None else read_object(file)


def allowed(resources: dict[str, Any]) -> list[str]:
    """The entries in force: class paths, or prefixes of them that end with a dot.

    Raises:
        ConfigError: the list is malformed.
    """
    listed = resources.get(LIST, list(DEFAULT_CLASS_ALLOW_LIST))
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise ConfigError(f"{LIST}: expected a list of class paths, found {str(listed)[:80]}; correct resources.json")
    return listed


def is_too_broad(listed: Sequence[str]) -> list[str]:
    """Entries that let a job call more of this package than its classes, such as its prefix."""
    return [entry for entry in listed if entry.startswith(PACKAGE) and entry not in CLASSES]


def allow(kit: Path, also: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Add this package's classes to the allow-list in a startup kit's ``local/resources.json``.

    Wider entries of this package go; everything else in the file stays.

    Args:
        kit: the startup kit, or its ``local`` folder.
        also: class paths beside ours; one that ends with a dot allows all below it.

    Returns:
        The entries that were not listed before, and those that went; the file is written only when there are some.

    Raises:
        ConfigError: there is no such folder, its resources are malformed, or ``also`` names more of this package.
    """
    if wide := is_too_broad(also):
        raise ConfigError(f"--also {wide[0]}: of flare_sparse a job may name its classes only, and these are allowed")
    local = local_folder(kit)
    resources = read_resources(local)
    listed = allowed(resources)
    new = [entry for entry in (*CLASSES, *also) if entry not in listed]
    wide = is_too_broad(listed)
    if new or wide:
        kept = [entry for entry in listed if entry not in wide]
        write_object(local / RESOURCES, {**resources, MODE: resources.get(MODE, "enforce"), LIST: [*kept, *new]})
    return new, wide
