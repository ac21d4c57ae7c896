"""Follow a job of a running federation: its status, its rounds, and whether its server still runs it."""

import base64
import json
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nvflare.apis.job_def import JobMetaKey
from nvflare.fuel.flare_api.api_spec import JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.fuel.hci.proto import MetaKey, MetaStatusValue

from ...results.runs.progress import ProgressFormatter
from ...results.runs.record import GrowingRecord
from ..controller import STATS
from .connection import LOST, ServerConnection, describe_lost_job

POLL_S = 2.0
START_S = 10.0
"""Seconds that a job's process needs to start; asked before that, FLARE's server logs an error."""
MISSES = 2
"""Number of successive rounds without a site after which the command looks for the reason."""
DROPPED = "DROPPED"
"""Status of a job that must be submitted again, because FLARE has dropped a connected site from it."""


class JobFollower:
    """Shows a job's changes of status and its rounds.

    Args:
        connection: connection to the server.
        job: id of the job.
        on_line: called with a line of text for each change of status, each round and each hint.
        record: extended by the job's rounds as they are committed; None: the job has none.
        restarts: whether :meth:`follow` ends with ``DROPPED`` for a job that must be submitted again.
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
        record: GrowingRecord | None,
        *,
        restarts: bool = False,
        shown: set[int] | None = None,
    ):
        self._connection, self._job, self._on_line = connection, job, on_line
        self._record, self._formatter, self._restarts = record, ProgressFormatter(), restarts
        self.shown: set[int] = set() if shown is None else shown
        self.dropped: list[str] = []
        self._asks_at: float | None = None
        self._misses: dict[str, int] = {}

    def follow(self) -> str:
        """Wait for the end of the job and return its last status, or ``DROPPED``.

        Raises:
            JobFailed: the server does not reply, or was restarted.
        """
        status = ""
        while True:
            previous, status = status, self._connection.ask(lambda session: str(session.get_job_status(self._job)))
            if status == "RUNNING" and self._record is not None:
                self._show_rounds(self._record)
                if self.dropped:
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
        for site in sorted(site for site, count in self._misses.items() if count == MISSES):
            again = "the job is submitted again by itself" if self._restarts else "run this command again"
            self._on_line(
                f"{site} did not reply in {MISSES} rounds. If it does not run, start it (KIT/startup/start.sh at the "
                f"site); FLARE drops a site that was restarted from the job, and then {again}. If its training takes "
                "longer, raise federation.task_timeout_s or federation.round_minutes"
            )

    def _show_rounds(self, record: GrowingRecord) -> None:
        """Show the new rounds, and look for sites that FLARE has dropped from the job.

        Raises:
            JobFailed: the server was restarted and does not run the job any more.
        """
        self._asks_at = time.monotonic() + START_S if self._asks_at is None else self._asks_at
        if time.monotonic() < self._asks_at:
            return
        lines = self._connection.ask(partial(self._read_rounds, known=record.count))
        record.append(lines)
        for line in lines:
            self.show(line)
        for site in sorted(site for site, count in self._misses.items() if lines and count >= MISSES):
            if self._restarts and self._connection.ask(partial(is_dropped, site=site, job=self._job)):
                self.dropped.append(site)

    def _read_rounds(self, session: Session, known: int) -> list[dict[str, Any]]:
        """Return the lines of the rounds after those that are known; empty while the job starts or ends.

        Raises:
            JobFailed: the server was restarted and does not run the job any more.
        """
        try:
            return fetch_rounds(session, self._job, known)
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


def fetch_rounds(session: Session, job: str, known: int) -> list[dict[str, Any]]:
    """Return the lines of a running job's ``rounds.jsonl`` after the first ones.

    Args:
        session: session of an admin.
        job: id of the job.
        known: number of lines to pass over.

    Raises:
        Exception: of several kinds: the job starts or ends, the connection is lost, or this admin may not ask.
    """
    # Statistics, which every role that may submit a job may read; app commands are not for FLARE's role lead.
    packed = session.show_stats(job, "server")["server"][STATS]["record"]
    lines: list[dict[str, Any]] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return lines[known:]


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


def is_dropped(session: Session, site: str, job: str) -> bool:
    """Return whether the client of a site is connected and does not run a job, as its own answer to the server says.

    Args:
        session: session of an admin.
        site: name of the site.
        job: id of the job.

    Raises:
        NoConnection, SessionClosed, AuthenticationError: the connection is lost.
    """
    try:
        entries = session.get_client_job_status([site]) or []
    except LOST:
        raise
    # FLARE raises several kinds of exceptions: the client is not connected, or this admin may not ask.
    except Exception:  # noqa: BLE001
        return False
    entries = [entry for entry in entries if entry.get(MetaKey.CLIENT_NAME) == site]
    # An error of the client is no proof that it does not run the job.
    unclear = {MetaStatusValue.NO_REPLY, MetaStatusValue.ERROR} & {entry.get(MetaKey.STATUS) for entry in entries}
    return bool(entries) and not unclear and all(entry.get(MetaKey.JOB_ID) != job for entry in entries)
