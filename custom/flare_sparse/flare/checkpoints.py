"""Where an end of a deployed job keeps its checkpoints, said by its own local files, never by a job; and how long."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import yaml
from nvflare.apis.workspace import Workspace

from ..checkpoint.store import FINISHED, Store
from ..checkpoint.writing import sync_to_disk
from ..data.source import LOCAL_FILE, SITE_FILE_VARIABLE
from ..endpoints.server import SERVER
from ..errors import CheckpointError, ConfigError

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


def delete_archived(root: Path) -> None:
    """Drop the server's checkpoints of jobs below ``root`` that ended and whose result is in FLARE's job store.

    FLARE removes a job's folder when it has archived it, and never before.
    """
    for mark in root.glob(f"*/{SERVER}/{FINISHED}"):
        store = Store(mark.parent, {})
        with suppress(CheckpointError):  # that job runs: its checkpoints are its own
            store.claim()
            result = store.get_finished()
            if result is not None and not result.is_dir():
                store.delete()
                store.clear_finished()
            store.release()


def mark_job_finished(store: Store, workspace: Workspace, job_id: str) -> None:
    """The result of a job is in its folder, on the disk: mark its checkpoints, which stay until FLARE has archived it.

    Raises:
        CheckpointError: the mark could not be written.
    """
    folder = Path(workspace.get_run_dir(job_id)).absolute()
    sync_to_disk(folder)
    sync_to_disk(folder.parent)
    store.mark_finished(folder)


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
