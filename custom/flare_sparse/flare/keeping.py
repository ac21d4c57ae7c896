"""Where an end of a deployed job keeps its checkpoints: said by its own local files, never by a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml
from nvflare.apis.workspace import Workspace

from ..data.source import LOCAL_FILE, SITE_FILE_VARIABLE
from ..errors import ConfigError

CHECKPOINTS_VARIABLE = "FLARE_SPARSE_CHECKPOINTS"
OFF = "off"


def checkpoint_folder(workspace: Workspace, end: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for checkpoints of ``end``, the server or a site; None when they are turned off.

    The first of three places that says so: the variable ``FLARE_SPARSE_CHECKPOINTS``; ``checkpoints`` in the site file
    or the server's ``local/flare_sparse.yaml``; else ``checkpoints`` in the kit itself. ``off`` turns them off. A
    relative path starts at the kit.

    Raises:
        ConfigError: the file says something else than a path.
    """
    root = Path(workspace.get_root_dir())
    named = environment.get(SITE_FILE_VARIABLE, "").replace("{site}", end)
    file = Path(named) if named else Path(workspace.get_site_config_dir()) / LOCAL_FILE
    said = environment.get(CHECKPOINTS_VARIABLE) or _local(file)
    return None if said == OFF else (root / Path(said or "checkpoints").expanduser()).absolute()


def _local(file: Path) -> str | None:
    if not file.is_file():
        return None
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    said = content.get("checkpoints") if isinstance(content, dict) else None
    if said is False:  # YAML's own reading of "off"
        return OFF
    if said is not None and not isinstance(said, str):
        raise ConfigError(f"{file}: checkpoints: expected a path or off, found {said!r}")
    return said
