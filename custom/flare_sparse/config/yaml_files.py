"""YAML files and ``--set key.path=value`` overrides, as plain values before validation against the schema."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, suggest


class _Loader(yaml.SafeLoader):
    """Loader that reads YAML 1.2 numbers such as ``1e-3`` and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    """Parse one YAML document.

    Raises:
        yaml.YAMLError: the document is malformed or gives a key twice.
    """
    # _Loader is a SafeLoader.
    return yaml.load(text, _Loader)  # noqa: S506


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the top-level section of a file.

    Raises:
        ConfigError: there is no such file, it is not YAML, or its top level is not a section.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        siblings = [p.name for p in path.parent.glob("*.y*ml")]
        raise ConfigError(f"{path}: no such file.{suggest(path.name, siblings)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a section of `key: value` lines, found {type(data).__name__}")
    return data


def apply_overrides(data: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return a copy of ``data`` with each assignment ``key.path=value`` applied; values are YAML.

    Raises:
        ConfigError: assignments are malformed, or lead through a value that is not a section. The text lists all.
    """
    result, problems = dict(data), []
    for assignment in assignments:
        try:
            result = _assign(result, assignment)
        except (ValueError, yaml.YAMLError) as error:
            problems.append(f"--set {assignment}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def _assign(data: dict[str, Any], assignment: str) -> dict[str, Any]:
    path, sign, value = assignment.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise ValueError("expected key.path=value, such as method.sparsity=0.95")
    return _set_value(data, keys, parse_yaml(value))


def _set_value(data: Any, keys: Sequence[str], value: Any) -> dict[str, Any]:
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ValueError(f"{keys[0]!r} cannot be set in {data!r}, which is not a section")
    return {**data, keys[0]: _set_value(data.get(keys[0]), keys[1:], value) if keys[1:] else value}


def find_non_finite(data: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the numbers in ``data`` that are infinite or NaN."""
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        child_path = f"{path}.{key}" if path else str(key)
        if isinstance(value, float) and not math.isfinite(value):
            yield child_path
        yield from find_non_finite(value, child_path)
