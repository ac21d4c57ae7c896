"""Run many rounds with faults, and many sites; check that every reply is accounted for and that memory does not grow.

    python benchmarks/faults/soak.py --all [--folder soak]
    python benchmarks/faults/soak.py local simulator many [--rounds 200] [--sites 8] [--share 0.05]

*local*: 200 rounds, 8 sites, every message through the real wire in one process. *simulator*: the same as a FLARE job,
with one process per site. 5 % of the replies have a fault: training raises, returns NaN, gets a wrong shape, or ends
after the round. *many*: a FLARE job of 64 sites and 5 rounds without faults, two sites at a time. A run passes if all
sites are accounted for in every round, every round was committed, faults occurred as configured, and no process grows
by 1 MB per round after round 20 (*many* is too short for a slope). Writes FOLDER/soak.json; exits with 1 if a run
fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from soaking import local, simulator

KINDS = ("local", "simulator", "many")
MOST_MB_A_ROUND = 1.0
# The sites of a simulator start one after the other: the first round exceeds the timeout and is retried.
LATE_S, TIMEOUT_S = 14.0, 10


def build_settings(rounds: int, share: float, timeout_s: int) -> dict[str, Any]:
    return {
        "name": "soak",
        "seed": 7,
        "method": {
            "name": "fedsparsify",
            "sparsity": 0.8,
            "rounds": rounds,
            "training": {"epochs": 1, "lr": 0.01, "batch_size": 32},
        },
        "task": {"class": "soaking.faulty.FaultyTask", "share": share, "late_s": LATE_S},
        "federation": {"min_sites": 4, "retries": 9, "task_timeout_s": timeout_s},
    }


def check(figures: dict[str, Any], rounds: int, share: float) -> dict[str, bool]:
    """Return whether each condition holds, by name."""
    grown = figures["steepest MB a round"]
    checks = {
        "every round committed": figures["rounds"] == rounds,
        "every round balanced": figures["rounds balanced"] == figures["rounds recorded"],
        "faults struck": (figures["faults"] > share / 2) if share else figures["faults"] == 0,
    }
    return checks if rounds <= 25 else {**checks, "memory stays": grown is not None and grown < MOST_MB_A_ROUND}


def run(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    rounds, sites, share = (5, options.many, 0.0) if kind == "many" else (options.rounds, options.sites, options.share)
    job = build_settings(rounds, share, 600 if kind == "many" else TIMEOUT_S)
    if kind == "local":
        figures = local.soak(job, sites, share)
    else:
        processes = options.processes if kind == "many" else None
        figures = simulator.soak(job, sites, options.folder.resolve() / kind, processes)
    return {"sites": sites, **figures, "holds": check(figures, rounds, share)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--many", type=int, default=64, help="number of sites of the kind many")
    parser.add_argument("--processes", type=int, default=2, help="how many of these sites run at a time")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--folder", type=Path, default=Path("soak"))
    options = parser.parse_args()
    if unknown := sorted(set(options.kinds) - set(KINDS)):
        parser.error(f"no such kind: {', '.join(unknown)}")
    chosen = KINDS if options.all else options.kinds
    if not chosen:
        parser.error("name a kind, or --all")
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "soak.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    for kind in chosen:
        results[kind] = run(kind, options)
        print(kind, json.dumps(results[kind], indent=2), flush=True)
        file.write_text(json.dumps(results, indent=2) + "\n")
    return int(not all(all(results[kind]["holds"].values()) for kind in chosen))


if __name__ == "__main__":
    sys.exit(main())
