"""What servers asked of a site, summarized from its own records, and the declaration of its people in its kit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...config.people import PEOPLE_FILE, ReleaseGate, find_table, propose
from ...config.policy.policy import POLICY_FILE, read_policy
from ...config.yaml_files import format_yaml
from ...core.checkpoint.writing import replace_atomically
from ...core.errors import ConfigError
from ...privacy.release.record import Rule
from ...privacy.release.site import RELEASE_FOLDER
from ...rounds.endpoints.request_log import RunRecord, read_record
from ...tasks.data.source import LOCAL_FILE, find_site_data
from ...tasks.data.tables import read_table
from ..session import REQUESTS_FOLDER
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
