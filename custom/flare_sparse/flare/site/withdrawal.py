"""Withdrawal of subjects at a deployed site: its list of withdrawn subjects, and the checkpoints of its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nvflare.apis.workspace import Workspace

from ...core.errors import ConfigError
from ...core.names import read_names
from ...tasks.data.source import WITHDRAWN_FILE, read_withdrawn
from ..checkpoints import delete_old, find_checkpoint_folder
from .allow_list import find_local_folder
from .kit_files import write_text
from .preflight import read_site_name
from .requests import summarize_requests


@dataclass(frozen=True)
class SiteWithdrawal:
    """What a withdrawal changed at a site.

    Attributes:
        total: number of subjects on the site's list.
        added: how many of them are new.
        deleted: names of the jobs whose checkpoints were deleted.
        jobs: runs that the site has answered, with the last round; their models may have learned from the subjects.
    """

    total: int
    added: int
    deleted: list[str]
    jobs: list[str]


def withdraw_at_site(kit: Path, file: Path) -> SiteWithdrawal:
    """Add subjects to a site's list, which each later job heeds, and delete the checkpoints of its jobs.

    Args:
        kit: the startup kit.
        file: identifiers, one a line.

    Raises:
        ConfigError: the folder is no kit, or a job is running.
        DataError: the file cannot be read.
    """
    local = find_local_folder(kit).absolute()
    known, given = read_withdrawn(local), read_names(file)
    write_text(local / WITHDRAWN_FILE, "".join(f"{name}\n" for name in sorted(known | given)))
    name = read_site_name(local.parent)
    root, deleted = find_checkpoint_folder(Workspace(str(local.parent), name), name), []
    if root is not None:
        deleted = delete_old(root, name, days=0)
        if left := sorted({folder.parent.parent.name for folder in root.glob(f"*/{name}/[0-9]*")}):
            raise ConfigError(
                f"{root}: the subjects are on the list, but {', '.join(left)} is running with their data. Abort the "
                "job, and repeat this command"
            )
    jobs = [f"{run.job} (run {run.record.run}), to round {run.last_round}" for run in summarize_requests(kit)]
    return SiteWithdrawal(len(known | given), len(given - known), deleted, jobs)
