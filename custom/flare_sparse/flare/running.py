"""Jobs that use a site's data: each holds a lock in the startup kit from before it reads the data until it ends."""

import fcntl
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nvflare.apis.fl_context import FLContext

from .checkpoints import find_checkpoint_folder
from .workspace import get_workspace

RUNNING_FOLDER = "flare_sparse_running"
"""Folder in a site's startup kit with a file for each job that has used the site's data, locked while it runs."""
_PATIENCE_S, _POLL_S = 20.0, 0.2
# The locks of this process, which the kernel releases when it ends, even by a crash.
_held: dict[Path, int] = {}


@dataclass(frozen=True)
class DataUse:
    """A job that uses, or has used, a site's data.

    Attributes:
        job: FLARE's id of the job.
        process: id of the process.
        checkpoints: folder of its checkpoints, which a variable of that process may name; None: it keeps none.
    """

    job: str
    process: int
    checkpoints: str | None


def hold_data(fl_ctx: FLContext) -> None:
    """Record and lock, until this process ends, that the job of this process uses the data; a second call does nothing.

    Called before the list of withdrawn subjects is read: a withdrawal either waits for this job, or the job heeds it.

    Raises:
        OSError: the kit cannot be written.
    """
    workspace, name = get_workspace(fl_ctx), fl_ctx.get_identity_name()
    root = find_checkpoint_folder(workspace, name)
    job = DataUse(fl_ctx.get_job_id(), os.getpid(), None if root is None else str(root))
    file = _find_folder(Path(workspace.get_root_dir()), name) / f"{job.job}.json"
    if file in _held:
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(asdict(job)).encode(), 0)
    _held[file] = lock


def wait_for_jobs(kit: Path, site: str, patience_s: float) -> list[DataUse]:
    """Wait until no job uses a site's data, and return those that still do after some seconds."""
    deadline = time.monotonic() + patience_s
    while (running := list_uses(kit, site, running=True)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return running


def end_jobs(kit: Path, site: str) -> list[DataUse]:
    """End the processes of the jobs that use a site's data, with those that they started; return what still runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for use in list_uses(kit, site, running=True):
            with suppress(ProcessLookupError):
                # FLARE starts each job in a session of its own, so that this ends its script, too.
                is_leader = os.getpgid(use.process) == use.process
                (os.killpg if is_leader else os.kill)(use.process, number)
        if not (running := wait_for_jobs(kit, site, _PATIENCE_S)):
            return []
    return running


def _find_folder(kit: Path, site: str) -> Path:
    return kit / RUNNING_FOLDER / site


def list_uses(kit: Path, site: str, *, running: bool) -> list[DataUse]:
    """Return the jobs that use a site's data now, or those that have used it and have ended."""
    uses = []
    # No record is ever removed: a job that starts meanwhile would hold the lock of a removed file.
    for file in sorted(_find_folder(kit, site).glob("*.json")):
        # A job that was ended between the lock and the record has read no data.
        with suppress(ValueError, TypeError):
            if _is_locked(file) == running:
                uses.append(DataUse(**json.loads(file.read_text())))
    return uses


def _is_locked(file: Path) -> bool:
    with file.open() as lock:
        try:
            # Shared: commands that look at the same time, such as watch and withdraw, do not count as a running job.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
