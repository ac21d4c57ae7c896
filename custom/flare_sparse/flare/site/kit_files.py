"""The JSON files in a site's ``local`` folder: which of two FLARE reads, and changing one whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError


def find_active_file(local: Path, name: str) -> Path | None:
    """The file that FLARE reads: the site's own, else the kit's ``.default``; None where there is neither."""
    return next((file for file in (local / name, local / f"{name}.default") if file.is_file()), None)


def read_object(file: Path) -> dict[str, Any]:
    """What is in a file.

    Raises:
        ConfigError: it is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def write_object(file: Path, content: Mapping[str, Any]) -> None:
    """Put a JSON object in a file's place."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Put a text in a file's place."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
