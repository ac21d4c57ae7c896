"""Follow a job of a running federation: its status, its rounds, and whether its server still runs it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from nvflare.apis.job_def import JobMetaKey
from nvflare.fuel.flare_api.api_spec import JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session

from ...runs.growing import LEDGER, ROUNDS, GrowingRecord
from ...runs.progress import ProgressFormatter
from ..controller import READY
from ..feed import fetch_lines
from .connection import LOST, ServerConnection
from .ending import describe_lost_job, describe_timeout

POLL_S = 2.0
START_S = 60.0
"""Seconds after which a job's lines are asked for although its log does not say that it has started."""
MISSES = 2
"""Number of successive rounds without a site after which the command says what to do."""
_SILENT = re.compile(r"did not reply: (.*?)(?:  |$)")


class JobFollower:
    """Shows a job's changes of status and its rounds.

    Args:
        connection: connection to the server.
        job: id of the job.
        on_line: called with a line of text for each change of status, each round and each hint.
        record: extended by the job's rounds and messages as they are committed.

    Attributes:
        num_shown: number of rounds shown.
    """

    def __init__(self, connection: ServerConnection, job: str, on_line: Callable[[str], None], record: GrowingRecord):
        self._connection, self._job, self._on_line = connection, job, on_line
        self._record, self._formatter = record, ProgressFormatter()
        self._running_since: float | None = None
        self._is_ready = False
        self._misses: dict[str, int] = {}
        self.num_shown = 0

    def follow(self, timeout_s: float = 0.0) -> str:
        """Wait for the end of the job and return its last status.

        Args:
            timeout_s: seconds to wait; 0: no limit.

        Raises:
            JobFailed: the server does not reply, was restarted, or the job is not finished after ``timeout_s``.
        """
        began, status = time.monotonic(), ""
        while True:
            previous, status = status, self._connection.ask(lambda session: str(session.get_job_status(self._job)))
            if status == "RUNNING":
                self._show_rounds()
            # That the job is submitted was said when it was.
            if status not in (previous, "SUBMITTED"):
                self._on_line(f"job {self._job}: {status.lower()}")
            if status.startswith("FINISHED"):
                return status
            if timeout_s and time.monotonic() - began > timeout_s:
                raise describe_timeout(self._job, status, timeout_s)
            time.sleep(POLL_S)

    def show(self, line: str) -> None:
        """Show the line of a round, and what to do when the same site was silent in several rounds in a row."""
        self.num_shown += 1
        self._on_line(line)
        match = _SILENT.search(line)
        silent = set(match.group(1).split(", ")) if match else set()
        self._misses = {site: self._misses.get(site, 0) + 1 for site in silent}
        for site in sorted(site for site, count in self._misses.items() if count == MISSES):
            self._on_line(
                f"{site} did not reply in {MISSES} rounds. If its client was restarted, it does not rejoin a running "
                "job: stop this command and run it again, without --resume; the job goes on from its last committed "
                f"round with {site}"
            )

    def _show_rounds(self) -> None:
        for line in self._connection.ask(self._read_rounds):
            self.show(self._formatter.format(line))

    def _read_rounds(self, session: Session) -> list[dict[str, Any]]:
        """Append the new lines to the record and return those of the rounds; empty while the job starts or ends.

        Raises:
            JobFailed: the server was restarted and does not run the job any more.
        """
        if not self._has_started(session):
            return []
        try:
            rounds, messages = fetch_lines(
                session, self._job, self._record.get_count(ROUNDS), self._record.get_count(LEDGER)
            )
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
        self._record.append(LEDGER, messages)
        self._record.append(ROUNDS, rounds)
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
