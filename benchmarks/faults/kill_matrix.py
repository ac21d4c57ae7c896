"""Kill each process of a federation in each phase of a round and check that nothing is lost: 25 kills.

    python benchmarks/faults/kill_matrix.py [--cells SJ:saving,CP:training] [--folder kills] [--ports 8202 8203]

The script provisions a project on loopback (mTLS, a server and three sites from startup kits, each with its supervisor)
and runs the job once undisturbed. For each cell it lets the job stop in the phase, verifies that it did, kills the
process, waits for the supervisors and submits the same job again. These properties must hold: the final model is that
of the undisturbed run, bit for bit; every site asked is accounted for in every round; no committed round is asked
again. Finished cells are skipped, so that the matrix can run in parts; ``--again`` repeats them.

SJ: the server's job process. SP+SJ: the server and its job process. CJ: the job process of site-2. CP: site-2's client.
trainer: training has no process of its own, the executor runs in CJ; this row ends CJ from within by ``os._exit(137)``,
like an out-of-memory kill. The other kills are SIGKILL.

Writes FOLDER/kills.json and FOLDER/kills.md; exits with 1 if a property of a cell does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from kills.cell import PHASES, TARGETS, resubmit, run_cell
from kills.federation import Federation, wait_for

JOB = """\
name: kills
seed: 3
method: {name: fedavg, rounds: 4, training: {lr: 0.01}}
task: {name: mortality, medications: 3, model: {name: mlp, hidden: [8]}}
federation: {min_sites: 3, task_timeout_s: 60}
"""


def format_table(cells: dict[str, Any]) -> str:
    """Return Markdown with a row per target and a column per phase."""
    lines = ["| | " + " | ".join(PHASES) + " |", "| --- " * (len(PHASES) + 1) + "|"]
    for target in TARGETS:
        row = [format_verdict(cells.get(f"{target}:{phase}")) for phase in PHASES]
        lines.append(f"| {target} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def format_verdict(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    if "error" in cell:
        return "broken off"
    failed = [name for name, holds in cell["checks"].items() if not holds]
    what = "not " + ", not ".join(failed) if failed else "holds"
    return f"{what}, {cell['seconds to recover']:.0f} s"


def run_undisturbed(federation: Federation, config: Path, folder: Path, results: dict[str, Any]) -> str:
    """Return the digest of the final model of a job in which no process is killed."""
    if "digest" not in results:
        wait_for(federation.is_connected, 120, "all sites connected", every=1)
        results["digest"] = resubmit(federation, config, make_folder(folder / "undisturbed"))["model_sha256"]
    return str(results["digest"])


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cells asked for; write the file after each."""
    folder = make_folder(options.folder.resolve())
    file, config = folder / "kills.json", folder / "kills.yaml"
    config.write_text(JOB)
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"cells": {}}
    federation = Federation(folder, tuple(options.ports))
    federation.prepare()
    try:
        for name in options.cells:
            if "checks" in results["cells"].get(name, {}) and not options.again:
                continue
            federation.start()
            wait_for(federation.is_connected, 120, "all sites connected", every=1)
            digest = run_undisturbed(federation, config, folder, results)
            try:
                target, phase = name.split(":")
                out = make_folder(folder / name.replace("+", "-").replace(":", "-"))
                cell = run_cell(federation, config, target, phase, out, digest)
            except Exception as error:  # noqa: BLE001 - the other cells run on
                traceback.print_exc()
                cell = {"error": f"{type(error).__name__}: {error}"}
                federation.stop()
            results["cells"][name] = cell
            print(f"{name}: {format_verdict(cell)}", flush=True)
            file.write_text(json.dumps(results, indent=2) + "\n")
            (folder / "kills.md").write_text(format_table(results["cells"]))
    finally:
        federation.stop()
    return results


def parse_cells(text: str) -> list[str]:
    every = [f"{target}:{phase}" for phase in PHASES for target in TARGETS]
    chosen = text.split(",") if text else every
    if unresults := [name for name in chosen if name not in every]:
        raise argparse.ArgumentTypeError(f"no such cell: {', '.join(unresults)}; cells are {', '.join(every)}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=parse_cells, default=parse_cells(""))
    parser.add_argument("--folder", type=Path, default=Path("kills"))
    parser.add_argument("--ports", type=int, nargs=2, default=(8202, 8203))
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    results = run(options)
    print(format_table(results["cells"]))
    return int(any(not format_verdict(results["cells"].get(name)).startswith("holds") for name in options.cells))


if __name__ == "__main__":
    sys.exit(main())
