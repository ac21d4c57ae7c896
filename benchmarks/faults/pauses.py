"""Pause a site or cut its connections and check that the round waits, nothing is lost and nothing counts twice.

    python benchmarks/faults/pauses.py [--folder pauses] [--ports 8202 8203 8204]

A provisioned federation on loopback (mTLS, three sites); site-2 reaches the server through a TCP proxy. Each case stops
the job in a phase of its second round and then sends SIGSTOP to the job process of site-2 for 5 or 30 s while it
trains, or resets all its connections before its upload, or resets them and refuses new ones for 20 s. These properties
must hold: the job finishes with the model of an undisturbed run, and every site contributes in every round, in the
first attempt. Writes FOLDER/pauses.json; exits with 1 if a property of a case does not hold.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kills.damage import VICTIM
from kills.drop import ROUND
from kills.federation import JOBS, Federation, Unexpected, wait_for
from kills.jobs import follow, submit, write_job
from kills.proxy import Proxy


def pause(seconds: float) -> Callable[[Federation, Proxy], str]:
    def act(federation: Federation, _proxy: Proxy) -> str:
        (process,) = federation.list_processes(VICTIM, JOBS[VICTIM])
        process.send_signal(signal.SIGSTOP)
        (federation.faults / "armed.json").unlink()
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        return f"{process.pid} was stopped for {seconds:.0f} s"

    return act


def cut(seconds: float) -> Callable[[Federation, Proxy], str]:
    def act(federation: Federation, proxy: Proxy) -> str:
        connections = proxy.cut(seconds)
        if not connections:
            raise Unexpected("no connection to cut")
        (federation.faults / "armed.json").unlink()
        return f"{connections} connections reset, none for {seconds:.0f} s"

    return act


CASES: dict[str, tuple[str, Callable[[Federation, Proxy], str]]] = {
    "SIGSTOP 5 s, training": ("training", pause(5)),
    "SIGSTOP 30 s, training": ("training", pause(30)),
    "cut, uploading": ("sending", cut(0)),
    "cut for 20 s, uploading": ("sending", cut(20)),
}


def run_case(federation: Federation, proxy: Proxy, name: str, job: Path, out: Path, digest: str) -> dict[str, Any]:
    """Run one job with one disturbance, which a thread causes when the job has reached its phase."""
    phase, act = CASES[name]
    federation.clear_checkpoints()
    (federation.faults / "reached.json").unlink(missing_ok=True)
    (federation.faults / "armed.json").write_text(json.dumps({"phase": phase, "participant": VICTIM, "round": ROUND}))
    done: list[str] = []

    def disturb() -> None:
        wait_for((federation.faults / "reached.json").is_file, 180, f"the job at {phase}")
        done.append(act(federation, proxy))

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    began = time.monotonic()
    result = follow(federation, submit(federation, job), out)
    thread.join(timeout=60)
    lines = result.rounds
    return {
        "checks": {
            "hit": bool(done),
            "same model": result.digest == digest,
            "balanced": result.is_balanced(),
            "everyone in every round": all(line["sites_contributed"] == line["sites_asked"] for line in lines),
            "first attempt": all(line["attempts"] == 1 for line in lines),
        },
        "what": done,
        "slowest round s": round(max(line["seconds"] for line in lines), 1),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("pauses"))
    parser.add_argument("--ports", type=int, nargs=3, default=(8202, 8203, 8204), help="sites', admins', proxy's")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    job = write_job(folder, "fedavg")
    results: dict[str, Any] = {}
    federation = Federation(folder, tuple(options.ports[:2]), {VICTIM: options.ports[2]})
    proxy = Proxy(options.ports[2], options.ports[0])
    federation.prepare()
    try:
        federation.start()
        wait_for(federation.is_connected, 120, "all sites connected", every=1)
        digest = follow(federation, submit(federation, job), folder / "undisturbed").digest
        for name in CASES:
            out = folder / name.replace(" ", "-").replace(",", "")
            try:
                results[name] = run_case(federation, proxy, name, job, out, digest)
            except Exception as error:  # noqa: BLE001 - the other cases run on
                results[name] = {"checks": {"ended": False}, "what": [f"{type(error).__name__}: {error}"]}
            print(name, json.dumps(results[name], indent=2), flush=True)
            (folder / "pauses.json").write_text(json.dumps(results, indent=2) + "\n")
    finally:
        federation.stop()
    return int(not all(all(case["checks"].values()) for case in results.values()))


if __name__ == "__main__":
    sys.exit(main())
