"""The people of a site: what servers have asked about them, their declaration in its kit, and their withdrawal."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from nvflare.apis.workspace import Workspace

from ...config.people import PEOPLE_FILE, ReleaseGate, find_table, propose
from ...config.policy.policy import POLICY_FILE, read_policy
from ...config.yaml_files import format_yaml
from ...core.checkpoint.writing import replace_atomically, write_new_file
from ...core.errors import ConfigError
from ...core.names import read_names
from ...privacy.release import RELEASE_FOLDER, Rule
from ...rounds.endpoints.request_log import RunRecord, read_record
from ...tasks.data.absence import require_known_subjects
from ...tasks.data.source import LOCAL_FILE, WITHDRAWN_FILE, find_site_data, has_site_data, read_withdrawn
from ...tasks.data.tables import read_table
from ..checkpoints import delete_old, find_checkpoint_folder
from ..running import end_jobs, list_uses, wait_for_jobs
from ..session import MODELS_FOLDER, REQUESTS_FOLDER
from .preflight import read_site_name
from .setup import find_local_folder


@dataclass(frozen=True)
class RunSummary:
    """What was asked of a site in one run.

    Attributes:
        site: name of the site.
        job: name of the job.
        record: every request with its model's digest.
    """

    site: str
    job: str
    record: RunRecord

    @property
    def label(self) -> str:
        """Name of the job, and id of the run."""
        return f"{self.job} (run {self.record.run})"

    @property
    def last_round(self) -> int:
        """Largest round that was asked for."""
        return max((request.round for request in self.record.requests), default=0)

    @property
    def last_time(self) -> float:
        """Unix time of the newest first answer to a model; 0: none was answered."""
        return max((request.time for request in self.record.requests), default=0.0)

    @property
    def rounds_with_many_models(self) -> list[str]:
        """Kind and round of the requests that came with more than one model, as after a new start of the job."""
        models: dict[str, set[str]] = {}
        for request in self.record.requests:
            models.setdefault(f"{request.kind} {request.round}", set()).add(request.digest)
        return [name for name, digests in models.items() if len(digests) > 1]


def summarize_requests(kit: Path) -> list[RunSummary]:
    """Return a summary of each run that a startup kit has a record of, the run with the latest answer last.

    Raises:
        ConfigError: the folder is no kit.
        RequestRefused: a record cannot be read.
    """
    folder = find_local_folder(kit).absolute().parent / REQUESTS_FOLDER
    try:
        files = sorted(folder.glob("*/*.json"))
    except OSError as error:
        raise ConfigError(f"{folder}: it cannot be read: {error}; run this as the user that runs the site") from error
    summaries = []
    for file in files:
        record = read_record(file)
        summaries.append(RunSummary(file.parent.name, file.stem.removesuffix(f"-{record.run}"), record))
    return sorted(summaries, key=lambda summary: summary.last_time)


FOLDS = 5
"""Folds that are proposed; a declaration may have another number."""


def declare_people(kit: Path, *, write: bool = False) -> tuple[str, list[str]]:
    """Return the text of a proposed declaration, and the columns that it leaves out.

    Args:
        kit: the startup kit.
        write: write the text to the kit.

    Raises:
        ConfigError: the folder is no kit, has a declaration already, or names no column of identifiers.
        DataError: the table cannot be read, or has no such column.
    """
    local = find_local_folder(kit).absolute()
    file, name = local / PEOPLE_FILE, read_site_name(local.parent)
    if write and file.exists():
        raise ConfigError(f"{file}: this site has declared its people; change the file by hand before the first job")
    rule = Rule(read_policy(local / POLICY_FILE).min_cell)
    gate = ReleaseGate(local, local.parent / RELEASE_FOLDER / name, rule)
    data = find_site_data(name, local)
    id_column = data.id or ("participant_id" if data.path.is_dir() else None)
    if id_column is None:
        raise ConfigError(f"{local / LOCAL_FILE}: names no column of identifiers; add a line such as id: patient")
    declaration, left = propose(read_table(find_table(data.path)), id_column, FOLDS, rule, gate.split_seed)
    text = format_yaml(declaration.model_dump(mode="json", exclude_none=True))
    if write:
        with replace_atomically(file) as part:
            part.write_text(text, encoding="utf-8")
    return text, left


def withdraw_at_site(kit: Path, file: Path, *, end_after_s: float | None = None) -> list[str]:
    """Add subjects to a site's list, which each later job heeds, and delete what its jobs hold of them.

    Args:
        kit: the startup kit.
        file: identifiers, one a line.
        end_after_s: seconds to wait for jobs that run, before they are ended; None: end none.

    Returns:
        Lines of text: how many subjects are on the list; which checkpoints, by the names of their jobs, files and
        folders were deleted; and the runs that the site has answered, whose models may have learned from them.

    Raises:
        ConfigError: the folder is no kit, or a job is running; the subjects are on the list then.
        DataError: the file cannot be read, or an identifier matches nothing in the site's data or two of its subjects.
    """
    local = find_local_folder(kit).absolute()
    name, known, given = read_site_name(local.parent), read_withdrawn(local), read_names(file)
    if has_site_data(local):
        # Look for the subjects of this list alone: earlier ones may have been removed from the data by now.
        data = find_site_data(name, local, heeds_list=False)
        require_known_subjects(replace(data, withdrawn=given))
    _write_private(local / WITHDRAWN_FILE, "".join(f"{name}\n" for name in sorted(known | given)))
    # Wait after the list is written: a job that starts from now on heeds it.
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
    uses = list_uses(kit, name, running=False)
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
