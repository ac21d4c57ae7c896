"""The sentence that the command prints for each way in which a job of a federation ends without a result."""

from __future__ import annotations

import pytest

from flare_sparse.flare.launch.connection import describe_end, find_reason


@pytest.mark.parametrize(
    ("status", "options", "happened", "remedy"),
    [
        ("EXECUTION_EXCEPTION", {}, "a process of the job died, at the server or at a site", "out of memory"),
        ("EXECUTION_EXCEPTION", {"rounds": 3}, "a process of the job died, at the server or at a site", "batch_size"),
        ("ABORTED", {"rounds": 3}, "an admin aborted it", ""),
        ("CAN_NOT_SCHEDULE", {}, "fewer sites were connected than it needs", "startup/start.sh"),
        ("ABNORMAL", {}, "before its first round", "flare-sparse check --site KIT"),
        ("ABNORMAL", {"rounds": 2}, "a participant left the job", "KIT/JOB_ID/log.txt"),
        ("ABANDONED", {}, "a participant left the job", "KIT/JOB_ID/log.txt"),
        ("ABNORMAL", {"reason": "E_QUORUM: round 3"}, "E_QUORUM: round 3", "docs/troubleshooting.md"),
        ("FAILED_TO_RUN", {"refusals": ["site-3: no BYOC"]}, "it was refused by site-3: no BYOC", "docs/hospital.md"),
    ],
)
def test_every_end_of_a_job_has_a_sentence_and_a_remedy(
    status: str, options: dict[str, object], happened: str, remedy: str
) -> None:
    error = describe_end("J", f"FINISHED:{status}", **options)  # type: ignore[arg-type]
    assert str(error).startswith(f"job J ended as FINISHED:{status}")
    assert happened in str(error)
    assert remedy in error.remedy
    assert ("refused" in str(error)) == (status == "FAILED_TO_RUN" or (status == "ABNORMAL" and not options))


def test_reason_is_the_first_error_of_the_log() -> None:
    log = "INFO start\nERROR FATAL_SYSTEM_ERROR received: E_DATA: no file\nERROR E_QUORUM: too few\n"
    assert find_reason(log) == "FATAL_SYSTEM_ERROR received: E_DATA: no file"
    assert find_reason("INFO all is well\n") == ""
