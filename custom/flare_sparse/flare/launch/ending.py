"""How a job ended without a result, in words: from FLARE's status, the job's log and the refusals of the sites."""

import re
from collections.abc import Sequence

from ...core.errors import FlareSparseError

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
            "At each site, run flare-sparse check --kit KIT: it finds the usual reasons (classes not allowed, no data)."
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


def describe_lost_job(job: str) -> JobFailed:
    """Return the error of a job whose server was restarted meanwhile."""
    return JobFailed(
        f"the server was restarted, and job {job} died with it; FLARE lists it as RUNNING for good, which does no harm"
    )
