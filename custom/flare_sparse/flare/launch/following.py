"""Follow a job of a running federation: its status, its rounds, and whether its server still runs it."""

import time
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any

from nvflare.apis.job_def import JobMetaKey
from nvflare.fuel.flare_api.api_spec import JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.hci.proto import MetaKey, MetaStatusValue

from ...results.runs.progress import ProgressFormatter
from ...results.runs.record import GrowingRecord
from ..controller import READY
from ..feed import fetch_rounds
from .connection import LOST, ServerConnection, describe_lost_job

POLL_S = 2.0
START_S = 60.0
"""Seconds after which a job's lines are asked for although its log does not say that it has started."""
MISSES = 2
"""Number of successive rounds without a site after which the command looks for the reason."""
DROPPED = "DROPPED"
"""Status of a job that must be submitted again, because FLARE has dropped a connected site from it."""


class SiteActivity(Enum):
    """What a site's client does, as its own answer to the server says."""

    RUNS_JOB = "its client is connected and runs the job"
    IDLE = "its client is connected and does not run the job"
    AWAY = "its client is not connected"
    UNKNOWN = "the server does not say what its client does"


class JobFollower:
    """Shows a job's changes of status and its rounds.

    Args:
        connection: connection to the server.
        job: id of the job.
        on_line: called with a line of text for each change of status, each round and each hint.
        record: extended by the job's rounds as they are committed.
        restarts: whether :meth:`follow` ends with ``DROPPED`` for a job that must be submitted again; otherwise a line
            says so.
        restart_command: command that submits the job again, for that line; empty: unknown.
        shown: numbers of the attempts of the rounds that were shown before the job was submitted again.

    Attributes:
        shown: numbers of the attempts of all rounds shown.
        dropped: sites that FLARE has dropped from the job and that are connected, once ``follow`` returns ``DROPPED``.
    """

    def __init__(
        self,
        connection: ServerConnection,
        job: str,
        on_line: Callable[[str], None],
        record: GrowingRecord,
        *,
        restarts: bool = False,
        restart_command: str = "",
        shown: set[int] | None = None,
    ):
        self._connection, self._job, self._on_line = connection, job, on_line
        self._record, self._formatter = record, ProgressFormatter()
        self._restarts, self._restart_command = restarts, restart_command or "this command, without --start"
        self._announced: dict[str, SiteActivity] = {}
        self.shown: set[int] = set() if shown is None else shown
        self.dropped: list[str] = []
        self._running_since: float | None = None
        self._is_ready = False
        self._misses: dict[str, int] = {}

    def follow(self) -> str:
        """Wait for the end of the job and return its last status, or ``DROPPED``.

        Raises:
            JobFailed: the server does not reply, or was restarted.
        """
        status = ""
        while True:
            previous, status = status, self._connection.ask(lambda session: str(session.get_job_status(self._job)))
            if status == "RUNNING" and self._show_rounds() and (self.dropped or self._explain_silence()):
                return DROPPED
            # That the job is submitted was said when it was.
            if status not in (previous, "SUBMITTED"):
                self._on_line(f"job {self._job}: {status.lower()}")
            if status.startswith("FINISHED"):
                return status
            time.sleep(POLL_S)

    def show(self, line: Mapping[str, Any]) -> None:
        """Show a round and its events, unless it was shown before; count the rounds in a row without each site.

        Args:
            line: a line of ``rounds.jsonl``.
        """
        # Every process of a job reports its rounds from the first one on.
        texts = self._formatter.format_with_events(line)
        if line["sequence"] in self.shown:
            return
        self.shown.add(line["sequence"])
        for text in texts:
            self._on_line(text)
        # A site that stays silent is quarantined after some rounds, and not asked in each of the next ones.
        silent = {*line["timed_out"], *line.get("quarantined", ())}
        self._misses = {site: self._misses.get(site, 0) + 1 for site in silent}
        self._announced = {site: activity for site, activity in self._announced.items() if site in silent}

    def _show_rounds(self) -> bool:
        """Show the new rounds and return whether there are any."""
        lines = self._connection.ask(self._read_rounds)
        for line in lines:
            self.show(line)
        return bool(lines)

    def _explain_silence(self) -> bool:
        """Say why a site has been silent for some rounds, once for each reason.

        Returns:
            Whether the job must be submitted again and may be.
        """
        for site in sorted(site for site, count in self._misses.items() if count >= MISSES):
            activity = self._connection.ask(partial(find_activity, site=site, job=self._job))
            if activity is SiteActivity.IDLE and self._restarts:
                self.dropped.append(site)
            elif self._announced.get(site) is not activity:
                self._announced[site] = activity
                self._on_line(f"{site} did not reply in {MISSES} rounds: {self._describe_remedy(activity, site)}")
        return bool(self.dropped)

    def _describe_remedy(self, activity: SiteActivity, site: str) -> str:
        """Return the reason of a site's silence, and what to do."""
        restart = f"press Ctrl-C and type: {self._restart_command}"
        remedies = {
            SiteActivity.RUNS_JOB: "it takes part again as soon as it replies in time. If its training takes longer, "
            "raise federation.task_timeout_s or federation.round_minutes",
            SiteActivity.IDLE: f"FLARE has dropped {site} from the job; to go on with it from the last committed "
            f"round, {restart}",
            SiteActivity.AWAY: "start it (KIT/startup/start.sh at the site). If its computer only lost its connection, "
            "it takes part again by itself; if it was restarted, "
            + ("the job is submitted again by itself" if self._restarts else restart),
            SiteActivity.UNKNOWN: f"if its client was restarted, it does not rejoin a running job: {restart}",
        }
        return f"{activity.value}; {remedies[activity]}"

    def _read_rounds(self, session: Session) -> list[dict[str, Any]]:
        """Append the new lines to the record and return those of the rounds; empty while the job starts or ends.

        Raises:
            JobFailed: the server was restarted and does not run the job any more.
        """
        if not self._has_started(session):
            return []
        try:
            rounds = fetch_rounds(session, self._job, self._record.count)
        except LOST:
            raise
        except JobNotRunning:
            # Also while a job ends, so it is no proof that the server has lost the job.
            if is_lost(session, session.get_job_meta(self._job)):
                raise describe_lost_job(self._job) from None
            return []
        # FLARE raises several kinds of exceptions while a job starts or ends. The lines are for display only: the
        # record that is downloaded at the end holds all rounds.
        except Exception:  # noqa: BLE001
            return []
        self._record.append(rounds)
        return rounds

    def _has_started(self, session: Session) -> bool:
        """Return whether the server's job process has its components.

        FLARE calls a job RUNNING as soon as its process is launched. The process needs seconds to start, and each
        request for lines before that leaves an error in the server's log, so the job's own log is asked first.
        """
        now = time.monotonic()
        if self._running_since is None:
            self._running_since = now
        if not self._is_ready:
            self._is_ready = has_logged_start(session, self._job) or now - self._running_since > START_S
        return self._is_ready


def has_logged_start(session: Session, job: str) -> bool:
    """Return whether the log of the server's job process says that its controller has started.

    Raises:
        NoConnection, SessionClosed, AuthenticationError: the connection is lost.
    """
    try:
        log = session.get_job_logs(job, "server")["logs"].get("server") or ""
    except LOST:
        raise
    # The log does not exist yet, or its owner does not let this admin read it.
    except Exception:  # noqa: BLE001
        return False
    return READY in log


def is_lost(session: Session, meta: dict[str, Any]) -> bool:
    """Return whether a job's server was restarted after the job was submitted and does not run the job any more.

    Args:
        session: session at the server.
        meta: FLARE's description of the job.
    """
    info = session.get_system_info()
    submitted, started = meta.get(JobMetaKey.SUBMIT_TIME.value), info.server_info.start_time
    if meta.get(JobMetaKey.STATUS.value) != "RUNNING" or not submitted or not started:
        return False
    if float(started) <= float(submitted):
        return False
    return meta.get(JobMetaKey.JOB_ID.value) not in {job.job_id for job in info.job_info}


def find_activity(session: Session, site: str, job: str) -> SiteActivity:
    """Return whether the client of a site is connected and runs a job.

    Args:
        session: session of an admin.
        site: name of the site.
        job: id of the job.

    Raises:
        NoConnection, SessionClosed, AuthenticationError: the connection is lost.
    """
    try:
        if site not in {client.name for client in session.get_system_info().client_info}:
            return SiteActivity.AWAY
        entries = session.get_client_job_status([site]) or []
    except LOST:
        raise
    # FLARE raises several kinds of exceptions: the client has just left, or this admin may not ask.
    except Exception:  # noqa: BLE001
        return SiteActivity.UNKNOWN
    entries = [entry for entry in entries if entry.get(MetaKey.CLIENT_NAME) == site]
    if any(entry.get(MetaKey.JOB_ID) == job for entry in entries):
        return SiteActivity.RUNS_JOB
    states = {entry.get(MetaKey.STATUS) for entry in entries}
    if MetaStatusValue.NO_REPLY in states:
        return SiteActivity.AWAY
    # An error of the client is no proof that it does not run the job.
    if not entries or MetaStatusValue.ERROR in states:
        return SiteActivity.UNKNOWN
    return SiteActivity.IDLE
