"""Many rounds with faults, and many sites: is every answer accounted for, and does memory stay where it is?

    python benchmarks/soak.py --all [--folder soak]
    python benchmarks/soak.py rehearsal simulator many [--rounds 200] [--sites 8] [--share 0.05]

*rehearsal*: 200 rounds, 8 sites, every message through the real wire in one process. *simulator*: the same as a FLARE
job, a process for each site. 5 % of the answers meet a fault: training raises, gives NaN, meets a wrong shape, or comes
after the round's end. *many*: a FLARE job of 64 sites
and 5 rounds without faults, two sites at a time. A run holds when every round's sites
are all accounted for, every round was committed, faults struck where they should, and no process grows by 1 MB a round
after round 20 (*many* is too short for a slope). Writes FOLDER/soak.json; exits with 1 when one does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from soaking import rehearsed, simulated

KINDS = ("rehearsal", "simulator", "many")
MOST_MB_A_ROUND = 1.0
LATE_S, TIMEOUT_S = 14.0, 10  # the sites of a simulator start one after the other: the first round is asked again


def settings(rounds: int, share: float, timeout_s: int) -> dict[str, Any]:
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


def holds(found: dict[str, Any], rounds: int, share: float) -> dict[str, bool]:
    """Each condition by name."""
    grown = found["steepest MB a round"]
    checks = {
        "every round committed": found["rounds"] == rounds,
        "every round balanced": found["rounds balanced"] == found["rounds recorded"],
        "faults struck": (found["faults"] > share / 2) if share else found["faults"] == 0,
    }
    return checks if rounds <= 25 else {**checks, "memory stays": grown is not None and grown < MOST_MB_A_ROUND}


def run(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    rounds, sites, share = (5, options.many, 0.0) if kind == "many" else (options.rounds, options.sites, options.share)
    told = settings(rounds, share, 600 if kind == "many" else TIMEOUT_S)
    if kind == "rehearsal":
        found = rehearsed.soak(told, sites, share)
    else:
        at_a_time = options.processes if kind == "many" else None
        found = simulated.soak(told, sites, options.folder.resolve() / kind, at_a_time)
    return {"sites": sites, **found, "holds": holds(found, rounds, share)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--many", type=int, default=64, help="sites of the third kind")
    parser.add_argument("--processes", type=int, default=2, help="of these, how many run at a time")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--folder", type=Path, default=Path("soak"))
    options = parser.parse_args()
    if unknown := sorted(set(options.kinds) - set(KINDS)):
        parser.error(f"no such kind: {', '.join(unknown)}")
    chosen = KINDS if options.all else options.kinds
    if not chosen:
        parser.error("say which, or --all")
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
