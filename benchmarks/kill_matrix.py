"""Kill each process of a federation in each phase of a round, and look whether anything is lost: 25 kills, by event.

    python benchmarks/kill_matrix.py [--cells SJ:saving,CP:training] [--folder kills] [--ports 8202 8203]

Provisions a project of its own on loopback (mTLS, a server and three sites from startup kits, each with its supervisor),
runs the job once undisturbed, and then for each cell: lets the job come to the phase and stop there, makes sure that it
did, kills, lets supervisors restart what they restart, and submits the same job again. What must hold: the final model
is the undisturbed one's, bit for bit; every site that was asked is accounted for in every round; no committed round is
asked again. Cells that are done are skipped, so that it can run in parts; ``--again`` does them anew.

SJ: the server's job process. SP+SJ: the server and its job process. CJ: the job process of site-2. CP: site-2's client.
trainer: there is no process of its own for training, the executor runs in CJ; this row ends CJ from within by
``os._exit(137)``, as an out-of-memory kill looks, where the other kills are SIGKILL.

Writes FOLDER/kills.json and FOLDER/kills.md; exits with 1 when a cell that ran did not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from kills.cell import PHASES, TARGETS, resubmit, run_cell
from kills.federation import Federation, until

JOB = """\
name: kills
seed: 3
method: {name: fedavg, rounds: 4, training: {lr: 0.01}}
task: {name: mortality, medications: 3, model: {name: mlp, hidden: [8]}}
federation: {min_sites: 3, task_timeout_s: 60}
"""


def table(cells: dict[str, Any]) -> str:
    """Markdown: targets down, phases across."""
    lines = ["| | " + " | ".join(PHASES) + " |", "| --- " * (len(PHASES) + 1) + "|"]
    for target in TARGETS:
        row = [verdict(cells.get(f"{target}:{phase}")) for phase in PHASES]
        lines.append(f"| {target} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def verdict(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    if "error" in cell:
        return "broken off"
    failed = [name for name, holds in cell["checks"].items() if not holds]
    what = "not " + ", not ".join(failed) if failed else "holds"
    return f"{what}, {cell['seconds to recover']:.0f} s"


def undisturbed(federation: Federation, config: Path, folder: Path, known: dict[str, Any]) -> str:
    """Digest of the model that the job ends with when nobody dies."""
    if "digest" not in known:
        until(federation.connected, 120, "all sites connected", every=1)
        known["digest"] = resubmit(federation, config, made(folder / "undisturbed"))["model_sha256"]
    return str(known["digest"])


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every cell that was asked for; the file is written after each."""
    folder = made(options.folder.resolve())
    file, config = folder / "kills.json", folder / "kills.yaml"
    config.write_text(JOB)
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"cells": {}}
    federation = Federation(folder, tuple(options.ports))
    federation.prepare()
    try:
        for name in options.cells:
            if "checks" in known["cells"].get(name, {}) and not options.again:
                continue
            federation.start()
            until(federation.connected, 120, "all sites connected", every=1)
            digest = undisturbed(federation, config, folder, known)
            try:
                target, phase = name.split(":")
                out = made(folder / name.replace("+", "-").replace(":", "-"))
                cell = run_cell(federation, config, target, phase, out, digest)
            except Exception as error:  # noqa: BLE001 - one broken cell must not cost the others
                traceback.print_exc()
                cell = {"error": f"{type(error).__name__}: {error}"}
                federation.stop()
            known["cells"][name] = cell
            print(f"{name}: {verdict(cell)}", flush=True)
            file.write_text(json.dumps(known, indent=2) + "\n")
            (folder / "kills.md").write_text(table(known["cells"]))
    finally:
        federation.stop()
    return known


def cells(text: str) -> list[str]:
    every = [f"{target}:{phase}" for phase in PHASES for target in TARGETS]
    chosen = text.split(",") if text else every
    if unknown := [name for name in chosen if name not in every]:
        raise argparse.ArgumentTypeError(f"no such cell: {', '.join(unknown)}; cells are {', '.join(every)}")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=cells, default=cells(""))
    parser.add_argument("--folder", type=Path, default=Path("kills"))
    parser.add_argument("--ports", type=int, nargs=2, default=(8202, 8203))
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    known = run(options)
    print(table(known["cells"]))
    return int(any(not verdict(known["cells"].get(name)).startswith("holds") for name in options.cells))


if __name__ == "__main__":
    sys.exit(main())
