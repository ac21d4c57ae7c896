"""Files in a site's ``local`` folder: find the one that FLARE reads, and replace a file atomically."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.checkpoint.writing import write_new_file
from ...core.errors import ConfigError


def find_active_file(local: Path, name: str) -> Path | None:
    """Return the file that FLARE reads: the site's own, else the kit's ``.default``; None if there is neither."""
    return next((file for file in (local / name, local / f"{name}.default") if file.is_file()), None)


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def write_object(file: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object, atomically."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def write_private_text(file: Path, text: str) -> None:
    """Replace a file by a text that names subjects, atomically; only the owner of the folder, as whom the site runs,
    may read it.
    """
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)
    write_new_file(part, text.encode())
    if os.geteuid() == 0:
        owner = file.parent.stat()
        os.chown(part, owner.st_uid, owner.st_gid)
    part.replace(file)


def write_text(file: Path, text: str) -> None:
    """Replace a file by a text, atomically: a crash leaves the old file or the new one."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
