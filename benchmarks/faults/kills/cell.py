"""One cell of the matrix: stop a job in a phase, kill a process, recover, submit the same job again, check."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .damage import VICTIM, damage_checkpoints
from .federation import JOBS, PARENTS, SERVER, SITES, Federation, Unexpected, wait_for
from .jobs import STATEFUL, Result, follow, is_loss_reported, read_committed, submit, write_job

TARGETS = ("SJ", "SP+SJ", "CJ", "CP", "trainer")
PHASES = ("before", "training", "uploading", "aggregating", "saving")
SUM_PHASES = ("keys", "shares", "values", "reveal")
"""Phases of a job with masked sums: a step of the sum is about to be asked (server) or answered (site)."""
STARTING = 180.0
HANGING = 4.0
"""Seconds after which a job whose parent process was killed counts as hanging; FLARE never ends it by itself."""


@dataclass(frozen=True)
class Kill:
    """A kill, and the damage after it.

    Attributes:
        method: method of the job.
        target: process that is killed.
        phase: phase of the round in which the job is stopped.
        round: round in which the job is stopped.
        ends: key of ``ENDS``; None: nothing is damaged.
        way: key of ``WAYS``.
    """

    method: str
    target: str
    phase: str
    round: int = 2
    ends: str | None = None
    way: str = ""

    @property
    def name(self) -> str:
        """Name of the cell."""
        name = f"{self.method}:{self.target}:{self.phase}"
        return f"{name}:{self.ends} {self.way}" if self.ends else name

    def choose_stop(self) -> dict[str, Any]:
        """Return the phase, participant and round at which the job must stop before the kill."""
        server, phase = self.target in ("SJ", "SP+SJ"), self.phase
        if phase == "uploading":
            phase = "receiving" if server else "sending"
        is_site = phase in ("training", "sending") or (phase in SUM_PHASES and not server)
        participant = VICTIM if is_site else SERVER
        return {"phase": phase, "participant": participant, "round": 0 if phase == "before" else self.round}

    def run(self, federation: Federation, folder: Path, planned: Result) -> dict[str, Any]:
        """Run the cell; return the checks and what happened.

        Args:
            federation: connected federation without a job.
            folder: receives configuration and record of the job.
            planned: record of the undisturbed run.

        Raises:
            Unexpected: the kill missed its phase, or the federation did not recover.
        """
        began = time.monotonic()
        federation.clear_checkpoints()
        job_folder = write_job(folder.parent, self.method)
        job, reached, committed = self._run_until_stopped(federation, job_folder)
        prepared = time.monotonic()
        kill(federation, self.target)
        (federation.faults / "armed.json").unlink()
        killed = time.monotonic()
        steps = recover(federation, job, self.target)
        damaged = damage_checkpoints(federation, self.ends, self.way) if self.ends else []
        recovered = time.monotonic()
        (federation.faults / "asked.jsonl").unlink(missing_ok=True)
        resumed = submit(federation, job_folder)
        result = follow(federation, resumed, folder)
        asked = [json.loads(line) for line in (federation.faults / "asked.jsonl").read_text().splitlines()]
        reported = [site for site in SITES if is_loss_reported(federation, resumed, site)]
        again = sorted({line["round"] for line in asked if line["kind"] != "evaluate"} & set(committed))
        return {
            **asdict(self),
            "checks": self._check(result, planned, reached, again, reported),
            "same model": result.digest == planned.digest,
            "loss reported by": reported,
            "full models": {site: n - planned.full_models.get(site, 0) for site, n in result.full_models.items()},
            "damaged": damaged,
            "committed": committed,
            "asked again": again,
            "steps": steps,
            "seconds": {
                "to the phase": round(prepared - began, 1),
                "to recover": round(recovered - killed, 1),
                "second job": round(time.monotonic() - recovered, 1),
            },
        }

    def _run_until_stopped(self, federation: Federation, job_folder: Path) -> tuple[str, bool, list[int]]:
        """Return the job's id, whether it stopped where it should, and the rounds that it has committed."""
        faults, wanted = federation.faults, self.choose_stop()
        for name in ("armed.json", "reached.json", "asked.jsonl"):
            (faults / name).unlink(missing_ok=True)
        (faults / "armed.json").write_text(json.dumps(wanted))
        job = submit(federation, job_folder)
        file = faults / "reached.json"
        reached = wait_for(lambda: json.loads(file.read_text()) if file.is_file() else None, STARTING, f"at {wanted}")
        pid, participant = reached.pop("pid"), wanted["participant"]
        if reached != wanted or pid not in {p.pid for p in federation.list_processes(participant, JOBS[participant])}:
            raise Unexpected(f"stopped at {reached} in {pid}, expected {wanted} in the job process of {participant}")
        return job, reached == wanted, read_committed(federation, job)

    def _check(
        self, result: Result, planned: Result, hit: bool, again: list[int], reported: list[str]
    ) -> dict[str, bool]:
        is_same = result.digest == planned.digest
        checks = {
            "hit": hit,
            "balanced": result.is_balanced(),
            "all sites in every round": all(line["sites_contributed"] == line["sites_asked"] for line in result.rounds),
        }
        if self.ends is None:
            return checks | {
                "same model": is_same,
                "committed rounds kept": not again,
                "bytes as planned": result.list_messages(-1) == planned.list_messages(-1),
            }
        # Only what a damaged site kept and no other end has can be lost, and then the site must have said so.
        may_lose = self.method in STATEFUL and "server" not in self.ends
        return checks | {"same model": is_same or (may_lose and bool(reported))}


def kill(federation: Federation, target: str) -> None:
    """Send SIGKILL to the target; the trainer ends as by the kernel's out-of-memory killer."""
    parts = {"SJ": [(SERVER, JOBS)], "SP+SJ": [(SERVER, PARENTS), (SERVER, JOBS)], "CP": [(VICTIM, PARENTS)]}
    processes = []
    for name, modules in parts.get(target, [(VICTIM, JOBS)]):
        processes += wait_for(
            lambda name=name, modules=modules: federation.list_processes(name, modules[name]),
            60,
            f"a process of {name}",
        )
    if target == "SP+SJ":
        federation.close_session()
    federation.kill(processes, signal.SIGUSR1 if target == "trainer" else signal.SIGKILL)


def recover(federation: Federation, job: str, target: str) -> list[str]:
    """Do what a user does: wait for the supervisors, then abort the job if it hangs. Return the steps taken."""
    steps = []
    parent = {"SP+SJ": SERVER, "CP": VICTIM}.get(target)
    if parent:
        try:
            wait_for(lambda: federation.list_processes(parent, PARENTS[parent]), 30, "the supervisor's restart")
            steps.append(f"the supervisor restarted {parent}")
        except Unexpected:
            federation.start()
            steps.append(f"start.sh of {parent}: its supervisor had given up")
    wait_for(federation.is_connected, 120, "all sites connected", every=0.3)
    steps.append(end_job(federation, job, wait=HANGING if parent else 90))
    wait_for(lambda: not federation.list_job_processes(), 120, "the processes of the killed job are gone", every=0.3)
    return steps


def end_job(federation: Federation, job: str, wait: float) -> str:
    """Return how the killed job ended: by itself or by an admin's command."""
    session = federation.get_session()
    try:
        wait_for(lambda: get_status(session, job).startswith("FINISHED"), wait, "its end", every=0.5)
        return get_status(session, job)
    except Unexpected:
        pass
    replies = []
    for name, command in (("abort_job", session.abort_job), ("delete_job", session.delete_job)):
        try:
            replies.append(f"{name}: {command(job) or 'done'}")
        except Exception as error:  # noqa: BLE001 - FLARE's error is the finding
            replies.append(f"{name}: {type(error).__name__}: {error}")
        else:
            break
    return f"still {get_status(session, job)} after {wait:.0f} s; " + "; ".join(replies)


def get_status(session: Any, job: str) -> str:
    """Return a job's status, or the name of the error."""
    try:
        return str(session.get_job_status(job))
    except Exception as error:  # noqa: BLE001 - FLARE raises several kinds for a missing job
        return type(error).__name__
