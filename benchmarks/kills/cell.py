"""One cell of the matrix: stop a job at a place, kill, recover, submit the same job again, and look at what is left."""

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

from .federation import JOBS, PARENTS, SERVER, Federation, Unexpected, until

VICTIM, ROUND = "site-2", 2
TARGETS = ("SJ", "SP+SJ", "CJ", "CP", "trainer")
PHASES = ("before", "training", "uploading", "aggregating", "saving")
STARTING = 180.0


def place(target: str, phase: str) -> dict[str, Any]:
    """Where the job has to stand when the kill comes: the process that stops there, and the round."""
    server = target in ("SJ", "SP+SJ")
    if phase == "uploading":
        phase = "receiving" if server else "sending"
    who = VICTIM if phase in ("training", "sending") else SERVER
    return {"phase": phase, "who": who, "round": 0 if phase == "before" else ROUND}


def run_cell(
    federation: Federation, config: Path, target: str, phase: str, out: Path, compute_digest: str
) -> dict[str, Any]:
    """Kill ``target`` in ``phase``; what must hold afterwards, and what happened on the way.

    Raises:
        Unexpected: the kill did not hit its phase, or the federation did not come back.
    """
    began = time.monotonic()
    faults, wanted = federation.faults, place(target, phase)
    for name in ("armed.json", "reached.json", "asked.jsonl"):
        (faults / name).unlink(missing_ok=True)
    (faults / "armed.json").write_text(json.dumps(wanted))
    job = submit(federation, config, out)
    reached = until(lambda: _read(faults / "reached.json"), STARTING, f"{job} at {wanted}")
    pid = reached.pop("pid")
    if reached != wanted or pid not in {p.pid for p in federation.processes(wanted["who"], JOBS[wanted["who"]])}:
        raise Unexpected(f"stopped at {reached} in {pid}, expected {wanted} in the job process of {wanted['who']}")
    committed = _rounds(federation.record(job))
    kill(federation, target)
    (faults / "armed.json").unlink()
    killed = time.monotonic()
    steps = recover(federation, job, target)
    (faults / "asked.jsonl").unlink(missing_ok=True)  # of the first job
    summary = resubmit(federation, config, out)
    asked = [json.loads(line) for line in (faults / "asked.jsonl").read_text().splitlines()]
    lost = sorted({line["round"] for line in asked if line["kind"] != "evaluate"} & set(committed))
    checks = {
        "hit": reached == wanted,
        "same model": summary["model_sha256"] == compute_digest,
        "balanced": balanced(out / "rounds.jsonl"),
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
    """SIGKILL, or an end of the trainer as by the kernel's out-of-memory killer."""
    parts = {"SJ": [(SERVER, JOBS)], "SP+SJ": [(SERVER, PARENTS), (SERVER, JOBS)], "CP": [(VICTIM, PARENTS)]}
    found = []
    for name, modules in parts.get(target, [(VICTIM, JOBS)]):
        found += until(
            lambda name=name, modules=modules: federation.processes(name, modules[name]), 60, f"a process of {name}"
        )
    federation.kill(found, signal.SIGUSR1 if target == "trainer" else signal.SIGKILL)


def recover(federation: Federation, job: str, target: str) -> list[str]:
    """What a user does: nothing while the supervisors work, then abort what hangs; the steps taken."""
    steps = []
    parent = {"SP+SJ": SERVER, "CP": VICTIM}.get(target)
    if parent:
        try:
            until(lambda: federation.processes(parent, PARENTS[parent]), 30, "the supervisor's restart")
            steps.append(f"the supervisor restarted {parent}")
        except Unexpected:
            federation.start()
            steps.append(f"start.sh of {parent}: its supervisor had given up")
    until(federation.connected, 120, "all sites connected", every=1)
    steps.append(ended(federation, job, wait=20 if parent else 90))
    until(lambda: not federation.job_processes(), 90, "the processes of the killed job are gone", every=0.5)
    return steps


def ended(federation: Federation, job: str, wait: float) -> str:
    """How the killed job came to its end, by itself or by an admin's command."""
    with federation.session(60) as session:

        def status() -> str:
            return str(session.get_job_status(job))

        try:
            until(lambda: status().startswith("FINISHED"), wait, "its end", every=1)
            return status()
        except Unexpected:
            pass
        said = []
        for name, command in (("abort_job", session.abort_job), ("delete_job", session.delete_job)):
            try:
                said.append(f"{name}: {command(job) or 'done'}")
            except Exception as error:  # noqa: BLE001 - what FLARE says to it is the finding
                said.append(f"{name}: {type(error).__name__}: {error}")
            else:
                break
        return f"still {status_or_gone(session, job)} after {wait:.0f} s; " + "; ".join(said)


def status_or_gone(session: Any, job: str) -> str:
    try:
        return str(session.get_job_status(job))
    except Exception as error:  # noqa: BLE001 - FLARE's ways to say that it is not there
        return type(error).__name__


def balanced(rounds: Path) -> bool:
    """Every site that was asked is in exactly one of the four columns of its round."""
    lines = [json.loads(line) for line in rounds.read_text().splitlines()]
    return bool(lines) and all(
        sorted([*line["sites_contributed"], *line["rejected"], *line["abstained"], *line["timed_out"]])
        == line["sites_asked"]
        for line in lines
    )


def _rounds(record: Path) -> list[int]:
    """Rounds of training that the killed job had committed."""
    file = record / "rounds.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [line["round"] for line in map(json.loads, lines) if line["kind"] != "evaluate"]


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.is_file() else None
