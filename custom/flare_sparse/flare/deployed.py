"""Submit a job to a running federation with an admin's startup kit, follow it, and fetch its record."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from ..errors import ConfigError
from .controller import RESULTS
from .recipe import SparseRecipe
from .simulator import JobFailed

LOGIN_TIMEOUT_S = 20.0
POLL_S = 1.0
_PROGRESS = re.compile(r" - ((?:round \d+/\d+|final model)  .*)$")
_ERRORS = ("FATAL_SYSTEM_ERROR", "ComponentNotAuthorized", "UnsafeComponentError", "not in allow_list")


def run_deployed(
    recipe: SparseRecipe,
    kit: Path,
    out: Path,
    *,
    timeout_s: float = 0.0,
    on_line: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Submit a recipe, follow its rounds in the server's log, and collect its record in ``out``.

    Args:
        recipe: the job.
        kit: startup kit of an admin who may submit jobs.
        out: result folder; the whole downloaded job is kept in ``out/job``.
        timeout_s: seconds the job may take; 0: as long as it wants. A job that takes longer goes on at the server.
        on_line: called with the job's id and state, and with each round's line.

    Returns:
        The summary.

    Raises:
        ConfigError: the kit is none, or the server cannot be reached with it.
        JobFailed: the job was refused, ended without a result, or is not done yet.
    """
    with _session(kit) as session, tempfile.TemporaryDirectory() as folder:
        recipe.export(folder)
        job = session.submit_job(str(Path(folder) / recipe.name))
        on_line(f"job {job} submitted")
        status, log = _followed(session, job, timeout_s, on_line)
        downloaded = Path(session.download_job_result(job, str(out / "job")))
    return _collected(downloaded, out, f"job {job} ended as {status}", log)


@contextmanager
def _session(kit: Path) -> Iterator[Session]:
    try:
        admin = json.loads((kit / "startup" / "fed_admin.json").read_text(encoding="utf-8"))["admin"]
        name, place = str(admin["username"]), f"{admin['host']}:{admin['port']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--kit {kit}: no startup kit of an admin: startup/fed_admin.json: {error!r}") from error
    try:
        session = new_secure_session(name, str(kit), timeout=LOGIN_TIMEOUT_S)
    except Exception as error:  # FLARE raises several kinds, some of them bare
        raise ConfigError(
            f"{name} cannot log in at {place}: {error}. Is the server up, and the kit of its project?"
        ) from error
    try:
        yield session
    finally:
        session.close()


def _followed(session: Session, job: str, timeout_s: float, on_line: Callable[[str], None]) -> tuple[str, str]:
    """The job's last status and the server's log, when it is done."""
    began, shown, status = time.monotonic(), 0, ""
    while True:
        before, status = status, str(session.get_job_status(job))
        log = _log(session, job)
        lines = [found.group(1) for found in map(_PROGRESS.search, log.splitlines()) if found]
        for line in lines[shown:]:
            on_line(line)
        shown = max(shown, len(lines))
        if status != before and not lines:
            on_line(f"job {job}: {status.lower()}")
        if status.startswith("FINISHED"):
            return status, log
        if timeout_s and time.monotonic() - began > timeout_s:
            raise JobFailed(
                f"job {job} is {status.lower()} after {timeout_s:.0f} s; it goes on at the server. Fetch its result "
                f"later with: nvflare job download {job}"
            )
        time.sleep(POLL_S)


def _log(session: Session, job: str) -> str:
    """The server's log of a job; empty while there is none."""
    try:
        return str(session.get_job_logs(job)["logs"].get("server", ""))
    except Exception:  # noqa: BLE001  (the log is for the eye only; a job that has none yet is no error)
        return ""


def _collected(job: Path, out: Path, ended: str, log: str) -> dict[str, Any]:
    record = next(iter(sorted(job.glob(f"**/app_server/{RESULTS}"))), None)
    if record is None or not (record / "summary.json").is_file():
        reasons = [line.strip() for line in log.splitlines() if any(word in line for word in _ERRORS)]
        said = "\n  ".join(dict.fromkeys(reasons)) or "the server's log names no error"
        raise JobFailed(f"{ended} without a result.\n  {said}\nWhat was left of it: {job}")
    for file in sorted(record.iterdir()):
        shutil.copy2(file, out / file.name)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary
