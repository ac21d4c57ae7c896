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

from nvflare.fuel.flare_api.api_spec import TargetType
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from ...errors import ConfigError
from ...runs.model_files import delete_models
from ...runs.progress import progress_line
from ..controller import RESULTS, STATS
from ..recipe import SparseRecipe
from .simulator import JobFailed

LOGIN_TIMEOUT_S = 20.0
POLL_S = 2.0
_REASON = re.compile(r"Component '.*is not in allow_list|FATAL_SYSTEM_ERROR.*|ModuleNotFoundError: .*|\bE_[A-Z_]+: .*")
_NO_REASON = (
    "The server's log names no error: most often a site that the job needs refused it. Its own log says why, and "
    "flare-sparse site preflight KIT finds the usual reasons there (not allowed, no data)"
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
        on_line(f"job {job}: submitted")
        status, shown = _followed(session, job, timeout_s, on_line)
        refused = _refusals(session, job)
        downloaded = Path(session.download_job_result(job, str(out / "job")))
    _collect(downloaded, out, f"job {job} ended as {status}", refused)
    for line in (out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[shown:]:
        on_line(progress_line(json.loads(line)))
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary


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


def _followed(session: Session, job: str, timeout_s: float, on_line: Callable[[str], None]) -> tuple[str, int]:
    """The job's last status, and how many rounds were shown."""
    began, shown, status = time.monotonic(), 0, ""
    while True:
        before, status = status, str(session.get_job_status(job))
        rounds = _rounds(session, job) if status == "RUNNING" else []
        for line in rounds[shown:]:
            on_line(line)
        shown = max(shown, len(rounds))
        if status != before:
            on_line(f"job {job}: {status.lower()}")
        if status.startswith("FINISHED"):
            return status, shown
        if timeout_s and time.monotonic() - began > timeout_s:
            raise JobFailed(
                f"job {job} is {status.lower()} after {timeout_s:.0f} s; it goes on at the server. Fetch its result later "
                f"with: nvflare job download {job} --startup-kit KIT"
            )
        time.sleep(POLL_S)


def _rounds(session: Session, job: str) -> list[str]:
    """Lines of the rounds so far; none while the job starts or ends."""
    try:
        found = session.show_stats(job, TargetType.SERVER)["server"][STATS]["rounds"]
    except Exception:  # noqa: BLE001  (only for the eye: FLARE raises several kinds while a job comes and goes)
        return []
    return [str(line) for line in found]


def _refusals(session: Session, job: str) -> str:
    """Who did not take the job when the server handed it out, and why; empty when everyone did."""
    answers = session.get_job_meta(job).get("job_deploy_detail") or []
    return ", ".join(str(answer) for answer in answers if not str(answer).endswith(": OK"))


def _collect(job: Path, out: Path, ended: str, refused: str) -> None:
    """Copy the record of a downloaded job to ``out``."""
    record = next(iter(sorted(job.glob(f"**/app_server/{RESULTS}"))), None)
    if record is None or not (record / "summary.json").is_file():
        log = "".join(file.read_text(errors="replace") for file in sorted(job.glob("**/log.txt"))[:1])
        said = next((found.group() for found in map(_REASON.search, log.splitlines()) if found), refused or _NO_REASON)
        raise JobFailed(f"{ended} without a result.\n  {said}\nWhat is left of it: {job}")
    delete_models(out)
    for file in sorted(record.iterdir()):
        shutil.copy2(file, out / file.name)
