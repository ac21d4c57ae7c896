"""What servers asked of a site, summarized from its own records of the requests that it answered.

Declaration of a site's people in its startup kit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ...config.people import PEOPLE_FILE, ReleaseGate, find_table, propose
from ...config.policy.policy import POLICY_FILE, read_policy
from ...config.yaml_files import format_yaml
from ...core.errors import ConfigError
from ...privacy.release.record import Rule
from ...privacy.release.site import RELEASE_FOLDER
from ...rounds.endpoints.request_log import RunRecord, read_record
from ...tasks.data.source import LOCAL_FILE, find_site_data
from ...tasks.data.tables import read_table
from ..session import REQUESTS_FOLDER
from .allow_list import find_local_folder, write_text
from .preflight import read_site_name


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
    def counts(self) -> dict[str, int]:
        """Number of different models that the site answered, by kind of request."""
        return dict(Counter(request.kind for request in self.record.requests))

    @property
    def answers(self) -> int:
        """Number of answers, retries included."""
        return sum(request.answers for request in self.record.requests)

    @property
    def last_round(self) -> int:
        """Largest round that was asked for."""
        return max((request.round for request in self.record.requests), default=0)

    @property
    def first_time(self) -> float | None:
        """Unix time of the first answer."""
        return min((request.time for request in self.record.requests), default=None)

    @property
    def last_time(self) -> float | None:
        """Unix time at which the last different model was answered."""
        return max((request.time for request in self.record.requests), default=None)

    @property
    def rounds_with_many_models(self) -> list[str]:
        """Kind and round of the requests that came with more than one model, as after a new start of the job."""
        models: dict[str, set[str]] = {}
        for request in self.record.requests:
            models.setdefault(f"{request.kind} {request.round}", set()).add(request.digest)
        return [name for name, digests in models.items() if len(digests) > 1]

    def to_dict(self) -> dict[str, object]:
        """Return the summary and every request as JSON values."""
        return {
            "site": self.site,
            "job": self.job,
            "run": self.record.run,
            "starts": self.record.start,
            "requests_by_kind": self.counts,
            "answers": self.answers,
            "last_round": self.last_round,
            "first_time": self.first_time,
            "last_time": self.last_time,
            "metrics_released": self.record.evaluations,
            "questions": len(self.record.questions),
            "sums": len(self.record.sums),
            "foreign": self.record.foreign,
            "rounds_with_many_models": self.rounds_with_many_models,
            "requests": [request.model_dump() for request in self.record.requests],
        }


COLUMNS = ("job", "last request", "answers", "models", "starts", "last answer")


def list_request_rows(kit: Path) -> list[list[str]]:
    """Return the cells of each run that a site's kit has a record of, the latest first; see ``COLUMNS``.

    Raises:
        ConfigError: the folder is no kit.
        RequestRefused: a record cannot be read.
    """
    return [
        [
            *(run.job, f"{requests[-1].kind} {run.last_round}" if (requests := run.record.requests) else "none"),
            *(str(run.answers), str(len(requests)), str(run.record.start), format_time(run.last_time)),
        ]
        for run in reversed(summarize_requests(kit))
    ]


def format_time(moment: float | None) -> str:
    """Return a Unix time as text, in the zone of this machine."""
    return "never" if moment is None else datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M")


def find_different_models(runs: Sequence[RunSummary], others: Any) -> list[str]:
    """Return the requests to which another site received other models, one text for each.

    Args:
        runs: summaries of this site.
        others: what ``site log --json`` has printed at another site.

    Raises:
        ConfigError: the other summaries are not of this form, or no request of a run was answered by both sites.
    """
    try:
        models: dict[tuple[str, str, int], set[str]] = {}
        for other in others["requests"]:
            for request in other["requests"]:
                models.setdefault((other["run"], request["kind"], request["round"]), set()).add(request["digest"])
    except (TypeError, KeyError) as error:
        raise ConfigError("this is not the output of flare-sparse site log KIT --json") from error
    differences, num_shared = [], 0
    for run in runs:
        for kind, t in dict.fromkeys((request.kind, request.round) for request in run.record.requests):
            digests = {request.digest for request in run.record.requests if (request.kind, request.round) == (kind, t)}
            others_digests = models.get((run.record.run, kind, t))
            if others_digests is None:
                continue
            num_shared += 1
            # A new start of the job sends a model twice; one in common is enough.
            if not digests & others_digests:
                differences.append(f"{run.job} (run {run.record.run}): {kind}, round {t}: another model")
    if not num_shared:
        raise ConfigError("no request was answered by both sites")
    return differences


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
    return sorted(summaries, key=lambda summary: summary.last_time or 0.0)


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
        write_text(file, text)
    return text, left
