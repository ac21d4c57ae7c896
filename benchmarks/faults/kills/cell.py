"""One cell of the matrix: stop a job in a phase, kill a process, recover, submit the same job again, check."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from flare_sparse.config import load_config
from flare_sparse.flare.export import export_job
from flare_sparse.flare.launch.submission import run_deployed
from flare_sparse.flare.recipe import SparseRecipe

from .federation import JOBS, PARENTS, SERVER, Federation, Unexpected, wait_for

VICTIM, ROUND = "site-2", 2
TARGETS = ("SJ", "SP+SJ", "CJ", "CP", "trainer")
PHASES = ("before", "training", "uploading", "aggregating", "saving")
STARTING = 180.0


def choose_stop(target: str, phase: str) -> dict[str, Any]:
    """Return the phase, participant and round at which the job must stop before the kill."""
    server = target in ("SJ", "SP+SJ")
    if phase == "uploading":
        phase = "receiving" if server else "sending"
    participant = VICTIM if phase in ("training", "sending") else SERVER
    return {"phase": phase, "participant": participant, "round": 0 if phase == "before" else ROUND}


def run_cell(federation: Federation, config: Path, target: str, phase: str, out: Path, digest: str) -> dict[str, Any]:
    """Kill ``target`` in ``phase``; return the checks and what happened.

    Raises:
        Unexpected: the kill missed its phase, or the federation did not recover.
    """
    began = time.monotonic()
    faults, wanted = federation.faults, choose_stop(target, phase)
    for name in ("armed.json", "reached.json", "asked.jsonl"):
        (faults / name).unlink(missing_ok=True)
    (faults / "armed.json").write_text(json.dumps(wanted))
    job = submit(federation, config, out)
    reached = wait_for(lambda: _read(faults / "reached.json"), STARTING, f"{job} at {wanted}")
    pid = reached.pop("pid")
    if reached != wanted or pid not in {
        p.pid for p in federation.list_processes(wanted["participant"], JOBS[wanted["participant"]])
    }:
        raise Unexpected(f"stopped at {reached} in {pid}, expected {wanted} in the job process of {wanted['who']}")
    committed = _read_rounds(federation.get_record(job))
    kill(federation, target)
    (faults / "armed.json").unlink()
    killed = time.monotonic()
    steps = recover(federation, job, target)
    (faults / "asked.jsonl").unlink(missing_ok=True)
    summary = resubmit(federation, config, out)
    asked = [json.loads(line) for line in (faults / "asked.jsonl").read_text().splitlines()]
    lost = sorted({line["round"] for line in asked if line["kind"] != "evaluate"} & set(committed))
    checks = {
        "hit": reached == wanted,
        "same model": summary["model_sha256"] == digest,
        "balanced": is_balanced(out / "rounds.jsonl"),
        "committed rounds kept": not lost,
    }
    return {
        "target": target,
        "phase": phase,
        "checks": checks,
        "committed": committed,
        "asked again": lost,
        "steps": steps,
        "seconds to recover": round(time.monotonic() - killed, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


def submit(federation: Federation, config: Path, out: Path) -> str:
    """Submit without following; the job's id."""
    folder = export_job(load_config(config).job, out / "submitted")
    with federation.session(60) as session:
        return str(session.submit_job(str(folder)))


def resubmit(federation: Federation, config: Path, out: Path) -> dict[str, Any]:
    """The same job again, followed to its end; its summary."""
    recipe = SparseRecipe(load_config(config).job)
    return run_deployed(recipe, federation.kits / "lead@coordination.org", out, timeout_s=240)


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
    wait_for(federation.is_connected, 120, "all sites connected", every=1)
    steps.append(end_job(federation, job, wait=20 if parent else 90))
    wait_for(lambda: not federation.list_job_processes(), 90, "the processes of the killed job are gone", every=0.5)
    return steps


def end_job(federation: Federation, job: str, wait: float) -> str:
    """Return how the killed job ended: by itself or by an admin's command."""
    with federation.session(60) as session:

        def status() -> str:
            return str(session.get_job_status(job))

        try:
            wait_for(lambda: status().startswith("FINISHED"), wait, "its end", every=1)
            return status()
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
    try:
        return str(session.get_job_status(job))
    except Exception as error:  # noqa: BLE001 - FLARE raises several kinds for a missing job
        return type(error).__name__


def is_balanced(rounds: Path) -> bool:
    """Return whether every site asked is in exactly one of the four columns of its round."""
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    return bool(lines) and all(
        sorted([*line["sites_contributed"], *line["rejected"], *line["abstained"], *line["timed_out"]])
        == line["sites_asked"]
        for line in lines
    )


def _read_rounds(record: Path) -> list[int]:
    """Return the training rounds that the killed job committed."""
    file = record / "rounds.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [line["round"] for line in map(json.loads, lines) if line["kind"] != "evaluate"]


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.is_file() else None
