"""The connection of an admin to a server that may be away for a while: it is made again until the server replies.

How a job ended without a result, in words: from FLARE's status, the job's log and the refusals of the sites.
"""

import contextlib
import io
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from nvflare.fuel.flare_api.api_spec import AuthenticationError, NoConnection, SessionClosed
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from ...core.errors import ConfigError, FlareSparseError

_REASON = re.compile(r"Component '.*is not in allow_list|FATAL_SYSTEM_ERROR.*|ModuleNotFoundError: .*|\bE_[A-Z_]+: .*")


class JobFailed(FlareSparseError):
    """The job ended without a result.

    Args:
        happened: one sentence: what happened, and the first error of the logs.
        remedy: what to do before the job is run again; empty: nothing.
    """

    code = "E_JOB"

    def __init__(self, happened: str, *, remedy: str = ""):
        super().__init__(happened)
        self.remedy = remedy


def find_reason(log: str) -> str:
    """Return the first error in the log of the server's job process; empty when it holds none."""
    matches = map(_REASON.search, log.splitlines())
    return next((match.group() for match in matches if match), "")


def describe_end(
    job: str, status: str, *, reason: str = "", refusals: Sequence[str] = (), rounds: int = 0
) -> JobFailed:
    """Return the error of a deployed job that ended without a result.

    Args:
        job: id of the job.
        status: FLARE's last status of the job, such as ``FINISHED:ABNORMAL``.
        reason: first error in the log of the server's job process; empty: there is none.
        refusals: answers of the participants that refused the job when it was deployed.
        rounds: number of rounds that the command has shown.
    """
    ended = f"job {job} ended as {status}"
    if refusals:
        happened = f"{ended}: it was refused by {', '.join(refusals)}"
        remedy = "Let these sites allow the job (docs/hospital.md)."
    elif reason:
        happened = f"{ended}: {reason}"
        remedy = "Remove the cause (docs/troubleshooting.md lists every E_ code)."
    elif status.endswith("EXECUTION_EXCEPTION"):
        happened = f"{ended}: a process of the job died, at the server or at a site: killed, or out of memory"
        remedy = "If a site ran out of memory, give it more, or lower method.training.batch_size."
    elif status.endswith("ABORTED"):
        happened, remedy = f"{ended}: an admin aborted it", ""
    elif status.endswith("CAN_NOT_SCHEDULE"):
        happened = f"{ended}: FLARE could not start it, because fewer sites were connected than it needs"
        remedy = "Start the missing sites: KIT/startup/start.sh at each."
    elif status.endswith("ABNORMAL") and not rounds:
        happened = (
            f"{ended} before its first round, and the server's log holds no error: a site that the job needs refused it"
        )
        remedy = (
            "At each site, run flare-sparse check --site KIT: it finds the usual reasons (missing classes or data)."
        )
    else:
        happened = f"{ended}, and the server's log holds no error: a participant left the job"
        remedy = "Look for the reason in KIT/JOB_ID/log.txt at each site."
    return JobFailed(happened, remedy=remedy)


def describe_silent_server(address: str, waited_s: float) -> JobFailed:
    """Return the error of a server that does not reply any more."""
    return JobFailed(
        f"the server at {address} has not replied for {waited_s:.0f} s",
        remedy="Start the server if it does not run: startup/start.sh in its kit.",
    )


T = TypeVar("T")

LOGIN_TIMEOUT_S = 20.0
RECONNECT_S = 300.0
"""Seconds for which a server that stopped replying is asked again; its supervisor restarts it within seconds."""
RETRY_S = 5.0
# A restarted server does not know the old session: it answers that the session is closed or not authenticated.
LOST = (NoConnection, SessionClosed, AuthenticationError)


class ServerConnection:
    """Runs questions to the server, and logs in again when the connection is lost.

    Args:
        kit: startup kit of an admin who may submit jobs.
        on_line: called with a line of text when the server stops replying, and when it replies again.

    Raises:
        ConfigError: this is no admin's startup kit, or the login failed.
    """

    def __init__(self, kit: Path, on_line: Callable[[str], None] = lambda line: None):
        self._kit, self._on_line = kit, on_line
        self.user, self.address = _read_admin(kit)
        self._session: Session | None
        try:
            self._session = self._open()
        # FLARE raises several kinds of exceptions here, some without a common base class.
        except Exception as error:
            raise ConfigError(
                f"{self.user} cannot log in at {self.address}: {error}. Is the server running (startup/start.sh in its "
                "kit), and is this a kit of its project?"
            ) from error

    def ask(self, question: Callable[[Session], T]) -> T:
        """Return the answer to a question; while the server does not reply, connect again for ``RECONNECT_S``.

        Raises:
            JobFailed: the server has not replied for ``RECONNECT_S``.
        """
        lost_at: float | None = None
        while True:
            try:
                if self._session is None:
                    self._session = self._open()
                answer = question(self._session)
            except LOST as error:
                self.close()
                if lost_at is None:
                    lost_at = time.monotonic()
                    self._on_line(
                        f"the server at {self.address} does not reply; trying again for {RECONNECT_S:.0f} s. "
                        "Committed rounds are safe at the server"
                    )
                if time.monotonic() - lost_at >= RECONNECT_S:
                    raise describe_silent_server(self.address, RECONNECT_S) from error
                time.sleep(RETRY_S)
                continue
            if lost_at is not None:
                self._on_line(f"the server at {self.address} replies again")
            return answer

    def close(self) -> None:
        """Log out; a server that does not reply is left alone."""
        session, self._session = self._session, None
        if session is not None:
            # Logging out of a dead server raises, and the connection is closed all the same.
            with contextlib.suppress(Exception):
                session.close()

    def _open(self) -> Session:
        try:
            # FLARE prints a line for every login, which would fill the screen while the server is away.
            with contextlib.redirect_stdout(io.StringIO()):
                return new_secure_session(self.user, str(self._kit), timeout=LOGIN_TIMEOUT_S)
        # While a server starts, a login may fail in ways that FLARE gives no class of their own.
        except (RuntimeError, OSError) as error:
            raise NoConnection(str(error)) from error


def _read_admin(kit: Path) -> tuple[str, str]:
    """Return the name of the admin and the address of the server.

    Raises:
        ConfigError: this is no admin's startup kit.
    """
    try:
        admin = json.loads((kit / "startup" / "fed_admin.json").read_text(encoding="utf-8"))["admin"]
        return str(admin["username"]), f"{admin['host']}:{admin['port']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--kit {kit}: this is no startup kit of an admin: startup/fed_admin.json: {error!r}"
        ) from error
