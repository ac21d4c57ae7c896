"""Withdrawal of subjects at a deployed site: its list of withdrawn subjects, and what its jobs hold of them."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from nvflare.apis.workspace import Workspace

from ...core.checkpoint.writing import write_new_file
from ...core.errors import ConfigError
from ...core.names import read_names
from ...tasks.data.absence import check_absence
from ...tasks.data.source import WITHDRAWN_FILE, find_site_data, has_site_data, read_withdrawn
from ..checkpoints import delete_old, find_checkpoint_folder
from ..running import end_jobs, remove_records, wait_for_jobs
from ..session import MODELS_FOLDER
from .preflight import read_site_name
from .requests import summarize_requests
from .setup import find_local_folder


def withdraw_at_site(kit: Path, file: Path, *, end_after_s: float | None = None) -> list[str]:
    """Add subjects to a site's list, which each later job heeds, and delete what its jobs hold of them.

    Returns:
        Lines of text: how many subjects are on the list; which checkpoints, by the names of their jobs, files and
        folders were deleted; and the runs that the site has answered, whose models may have learned from them.

    Args:
        kit: the startup kit.
        file: identifiers, one a line.
        end_after_s: seconds to wait for jobs that run, before they are ended; None: end none.

    Raises:
        ConfigError: the folder is no kit, or a job is running; the subjects are on the list then.
        DataError: the file cannot be read, or an identifier matches nothing in the site's data or two of its subjects.
    """
    local = find_local_folder(kit).absolute()
    name, known, given = read_site_name(local.parent), read_withdrawn(local), read_names(file)
    if has_site_data(local):
        # Of this list alone: what was listed before may have been removed from the data by now.
        data = find_site_data(name, local, heeds_list=False)
        check_absence(replace(data, withdrawn=given))
    _write_private(local / WITHDRAWN_FILE, "".join(f"{name}\n" for name in sorted(known | given)))
    # After the list is written: a job that starts from now on heeds it.
    running = wait_for_jobs(local.parent, name, end_after_s or 0.0)
    if running and end_after_s is not None:
        running = end_jobs(local.parent, name)
    if running:
        jobs = ", ".join(f"job {use.job} (process {use.process})" for use in running)
        raise ConfigError(
            f"{kit}: the subjects are on the list, but {jobs} is running with their data. Repeat this command later, "
            "or with --end-after SECONDS, which then ends the job at this site"
        )
    deleted = _delete_traces(local.parent, name)
    return [
        f"{len(given - known)} subjects added, {len(known | given)} on the list",
        f"deleted: {', '.join(deleted) or 'nothing'}",
        *(
            f"may have learned from them, run it again: {run.label}, to round {run.last_round}"
            for run in summarize_requests(kit)
        ),
    ]


def _delete_traces(kit: Path, name: str) -> list[str]:
    """Delete checkpoints, the site's own models and the folders of the jobs that used its data; return their names.

    Raises:
        ConfigError: a job of another kind holds checkpoints; nothing may be left of it unsaid.
    """
    uses = remove_records(kit, name)
    roots = {Path(use.checkpoints) for use in uses if use.checkpoints is not None}
    if (root := find_checkpoint_folder(Workspace(str(kit), name), name)) is not None:
        roots.add(root)
    deleted = [job for root in sorted(roots) for job in delete_old(root, name, days=0)]
    if left := sorted({folder.parent.name for root in roots for folder in root.glob(f"*/{name}")}):
        raise ConfigError(
            f"{kit}: the subjects are on the list, but {', '.join(left)} is running with their data: its checkpoints "
            "are locked. Abort the job, and repeat this command"
        )
    folders = [kit / MODELS_FOLDER, *(kit / use.job for use in uses)]
    for folder in [folder for folder in folders if folder.is_dir()]:
        shutil.rmtree(folder)
        deleted.append(folder.name)
    return deleted


def _write_private(file: Path, text: str) -> None:
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
