"""Methods and tasks of other distributions, which name them as entry points ``flare_sparse.methods`` and ``.tasks``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, suggest
from ..methods.registry import METHODS
from ..tasks.registry import TASKS
from .choice import find_name
from .user_classes import import_method_class, import_task_class

BUILT_IN: Mapping[str, Mapping[str, type[Any]]] = {"method": METHODS, "task": TASKS}
"""The package's own entries, by section of a configuration."""


@dataclass(frozen=True)
class Plugin:
    """A method or a task of an installed distribution.

    Attributes:
        name: its name in a configuration.
        path: its class, ``module.Class``.
        distribution: name and version of the distribution.
    """

    name: str
    path: str
    distribution: str

    @classmethod
    def from_entry_point(cls, entry: EntryPoint) -> Plugin:
        """Return what an entry point names; nothing is imported."""
        owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
        return cls(entry.name, entry.value.replace(":", ".").replace(" ", ""), owner)


def list_plugins(section: str) -> list[Plugin]:
    """Return the installed plugins of a section, ``"method"`` or ``"task"``, by name."""
    found = {Plugin.from_entry_point(entry) for entry in entry_points(group=f"flare_sparse.{section}s")}
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution, plugin.path))


def find_plugin(section: str, name: str) -> Plugin | None:
    """Return the plugin of a name; None if there is none.

    Raises:
        ConfigError: the package, or another distribution, has the same name.
    """
    found = [plugin for plugin in list_plugins(section) if plugin.name == name]
    owners = [f"{plugin.distribution} ({plugin.path})" for plugin in found]
    if found and name in BUILT_IN[section]:
        owners.insert(0, "flare-sparse itself")
    if len(owners) > 1:
        raise ConfigError(
            f"{section}.name: {name!r} is the name of {len(owners)} {section}s, of {' and '.join(owners)}; name one by "
            f"its class, {section}: {{class: {found[-1].path}}}, or uninstall the other distribution"
        )
    return found[0] if found else None


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
    path = plugin.path if plugin else name
    if "." in path:
        return import_method_class(path, folder) if section == "method" else import_task_class(path, folder)
    names = sorted({*BUILT_IN[section], *(plugin.name for plugin in list_plugins(section))})
    raise ConfigError(
        f"there is no {section} {name!r}; expected one of {', '.join(names)}, or module.Class for a {section} of your "
        f"own.{suggest(name, names)}"
    )


def name_plugin_classes(data: Mapping[str, Any], sections: Iterable[str] = ("method", "task")) -> dict[str, Any]:
    """Return a configuration whose plugins are named by their classes, as a job names them.

    A site decides by the class, not by a name that another distribution may have, too.

    Raises:
        ConfigError: as :func:`find_plugin`.
    """
    named = dict(data)
    for section in sections:
        key, name = find_name(section, data.get(section))
        plugin = find_plugin(section, name) if key == "name" and isinstance(name, str) else None
        if plugin is not None:
            settings = {field: value for field, value in data[section].items() if field != key}
            named[section] = {"class": plugin.path, **settings}
    return named
