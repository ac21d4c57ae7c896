"""Submit a job to a running federation with an admin's startup kit, follow it, and download its record."""

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

from nvflare.fuel.flare_api.api_spec import TargetType
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from ...errors import ConfigError
from ...runs.model_files import delete_models
from ...runs.progress import format_progress
from ..controller import RESULTS, STATS
from ..recipe import SparseRecipe
from .simulator import JobFailed

LOGIN_TIMEOUT_S = 20.0
POLL_S = 2.0
_REASON = re.compile(r"Component '.*is not in allow_list|FATAL_SYSTEM_ERROR.*|ModuleNotFoundError: .*|\bE_[A-Z_]+: .*")
_NO_REASON = (
    "The server's log holds no error. Most often a site that the job needs has refused it: see that site's log, and "
    "run there flare-sparse site preflight KIT, which finds the usual reasons (classes not allowed, no data)"
)


def run_deployed(
    recipe: SparseRecipe,
    kit: Path,
    out: Path,
    *,
    timeout_s: float = 0.0,
    on_line: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Submit a recipe, follow its rounds, and collect its record in ``out``.

    Args:
        recipe: the job.
        kit: startup kit of an admin who may submit jobs.
        out: result folder; the downloaded job is kept in ``out/job``.
        timeout_s: seconds to wait for the job; 0: no limit. The job continues at the server after the timeout.
        on_line: called with a line of text for each change of the job's status and for each round.

    Returns:
        The summary of the run.

    Raises:
        ConfigError: this is no admin's startup kit, or the login at the server failed.
        JobFailed: the job was refused, ended without a result, or is still running after ``timeout_s``.
    """
    with open_session(kit) as session, tempfile.TemporaryDirectory() as folder:
        recipe.export(folder)
        job = session.submit_job(str(Path(folder) / recipe.name))
        on_line(f"job {job}: submitted")
        status, num_printed = _follow_job(session, job, timeout_s, on_line)
        refusals = _describe_refusals(session, job)
        downloaded = Path(session.download_job_result(job, str(out / "job")))
    _collect_record(downloaded, out, f"job {job} ended as {status}", refusals)
    # Rounds that ended between the last poll and the end of the job.
    for line in (out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[num_printed:]:
        on_line(format_progress(json.loads(line)))
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


@contextmanager
def open_session(kit: Path) -> Iterator[Session]:
    """Log in at the server with an admin's startup kit; log out at the end of the block.

    Raises:
        ConfigError: this is no admin's startup kit, or the login failed.
    """
    try:
        admin = json.loads((kit / "startup" / "fed_admin.json").read_text(encoding="utf-8"))["admin"]
        name, address = str(admin["username"]), f"{admin['host']}:{admin['port']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--kit {kit}: this is no startup kit of an admin: startup/fed_admin.json: {error!r}"
        ) from error
    try:
        session = new_secure_session(name, str(kit), timeout=LOGIN_TIMEOUT_S)
    # FLARE raises several kinds of exceptions here, some without a common base class.
    except Exception as error:
        raise ConfigError(
            f"{name} cannot log in at {address}: {error}. Is the server running, and is this a kit of its project?"
        ) from error
    try:
        yield session
    finally:
        session.close()


def _follow_job(session: Session, job: str, timeout_s: float, on_line: Callable[[str], None]) -> tuple[str, int]:
    """Wait for the end of a job; return its last status and the number of rounds shown."""
    began, num_printed, status = time.monotonic(), 0, ""
    while True:
        previous, status = status, str(session.get_job_status(job))
        rounds = _read_rounds(session, job) if status == "RUNNING" else []
        for line in rounds[num_printed:]:
            on_line(line)
        num_printed = max(num_printed, len(rounds))
        if status != previous:
            on_line(f"job {job}: {status.lower()}")
        if status.startswith("FINISHED"):
            return status, num_printed
        if timeout_s and time.monotonic() - began > timeout_s:
            raise JobFailed(
                f"job {job} is {status.lower()} after {timeout_s:.0f} s and continues at the server. Download the "
                f"result later: nvflare job download {job} --startup-kit KIT"
            )
        time.sleep(POLL_S)


def _read_rounds(session: Session, job: str) -> list[str]:
    """Return the lines of the rounds so far; empty while the job starts or ends."""
    # FLARE raises several kinds of exceptions while a job starts or ends. The lines are for display only: the record
    # that is downloaded at the end holds all rounds.
    try:
        lines = session.show_stats(job, TargetType.SERVER)["server"][STATS]["rounds"]
    except Exception:  # noqa: BLE001
        return []
    return [str(line) for line in lines]


def _describe_refusals(session: Session, job: str) -> str:
    """Return which participants refused the job when the server deployed it, and why; empty when none did."""
    answers = session.get_job_meta(job).get("job_deploy_detail") or []
    return ", ".join(str(answer) for answer in answers if not str(answer).endswith(": OK"))


def _collect_record(job: Path, out: Path, outcome: str, refusals: str) -> None:
    """Copy the record of a downloaded job to ``out``.

    Raises:
        JobFailed: the job has no record; the text holds the first error in the server's log.
    """
    record = next(iter(sorted(job.glob(f"**/app_server/{RESULTS}"))), None)
    if record is None or not (record / "summary.json").is_file():
        log = "".join(file.read_text(errors="replace") for file in sorted(job.glob("**/log.txt"))[:1])
        matches = map(_REASON.search, log.splitlines())
        reason = next((match.group() for match in matches if match), refusals or _NO_REASON)
        raise JobFailed(f"{outcome} without a result.\n  {reason}\nThe job's downloaded files: {job}")
    delete_models(out)
    for file in sorted(record.iterdir()):
        shutil.copy2(file, out / file.name)
