"""Checkpoints of a deployed job: the folders at server and sites, and the deletion of old checkpoints."""

import math
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from nvflare.apis.workspace import Workspace

from ..config.yaml_files import read_yaml
from ..core.checkpoint.store import FINISHED, Store
from ..core.checkpoint.writing import sync_to_disk
from ..core.errors import CheckpointError, ConfigError
from ..rounds.endpoints.events import SERVER
from ..tasks.data.source import LOCAL_FILE, SITE_FILE_VARIABLE

CHECKPOINTS_VARIABLE = "FLARE_SPARSE_CHECKPOINTS"
OFF = "off"

KEPT_DAYS = 90
"""Days after which a site deletes the checkpoints of a job that was interrupted and never submitted again."""


def find_checkpoint_folder(workspace: Workspace, participant: str) -> Path | None:
    """Return the checkpoint folder of the server or a site; None when checkpoints are turned off.

    The first of these decides: the variable ``FLARE_SPARSE_CHECKPOINTS``; ``checkpoints`` in the site file or in the
    server's ``local/flare_sparse.yaml``; else the folder ``checkpoints`` in the startup kit. ``off`` turns checkpoints
    off. A relative path starts at the kit. A job cannot choose the folder.

    Raises:
        ConfigError: the file names something other than a path.
    """
    root = Path(workspace.get_root_dir())
    site_file = os.environ.get(SITE_FILE_VARIABLE, "").replace("{site}", participant)
    file = Path(site_file) if site_file else Path(workspace.get_site_config_dir()) / LOCAL_FILE
    setting = os.environ.get(CHECKPOINTS_VARIABLE) or _read_local_setting(file)
    return None if setting == OFF else (root / Path(setting or "checkpoints").expanduser()).absolute()


def delete_archived(root: Path) -> None:
    """Delete the server's checkpoints of finished jobs below ``root`` whose result is in FLARE's job store."""
    for mark in root.glob(f"*/{SERVER}/{FINISHED}"):
        store = Store(mark.parent, {})
        # A store that cannot be claimed belongs to a running job, which needs its checkpoints.
        with suppress(CheckpointError):
            store.claim()
            result = store.get_result_folder()
            # FLARE removes a job's folder only after archiving it. As long as the folder exists, a crash may still lose
            # the result, and the same job must be able to deliver it again.
            if result is not None and not result.is_dir():
                store.delete()
                store.unmark_finished()
            store.release()


def delete_old(root: Path, end: str, now: float | None = None, *, days: float, and_finished: bool = False) -> list[str]:
    """Delete the checkpoints of one end that no job has used for some days, and return the names of their jobs.

    Args:
        root: checkpoint folder of the server or a site.
        end: ``"server"`` or the site's name.
        now: Unix time; None: the current one.
        days: the days; 0: all that no job uses now.
        and_finished: delete those of finished jobs, too, however new they are.
    """
    oldest = (time.time() if now is None else now) - days * 86_400 if days else math.inf
    deleted = []
    for folder in sorted(root.glob(f"*/{end}")):
        # Read the time before the claim, whose file changes the folder.
        store, used = Store(folder, {}), folder.stat().st_mtime
        # A store that cannot be claimed belongs to a running job, such as the one that calls this.
        with suppress(CheckpointError):
            store.claim()
            # An interrupted job may be submitted again, so its checkpoints stay until they are old.
            if (and_finished and (folder / FINISHED).is_file()) or used <= oldest:
                shutil.rmtree(folder, ignore_errors=True)
                deleted.append(folder.parent.name)
            store.release()
            # The job's folder may hold checkpoints of other sites on the same machine.
            with suppress(OSError):
                folder.parent.rmdir()
    return deleted


def mark_job_finished(store: Store, workspace: Workspace, job_id: str) -> None:
    """Mark a job's checkpoints as finished; they are kept until FLARE has archived the job's folder.

    Raises:
        CheckpointError: the mark cannot be written.
    """
    folder = Path(workspace.get_run_dir(job_id)).absolute()
    # The result must be on disk before the mark: without the sync, a power cut could leave a mark without a result.
    sync_to_disk(folder)
    sync_to_disk(folder.parent)
    store.mark_finished(folder)


def _read_local_setting(file: Path) -> str | None:
    setting = read_yaml(file).get("checkpoints") if file.is_file() else None
    # YAML 1.1 reads an unquoted "off" as False.
    if setting is False:
        return OFF
    if setting is not None and not isinstance(setting, str):
        raise ConfigError(f"{file}: checkpoints: expected a path or off, found {setting!r}")
    return setting
