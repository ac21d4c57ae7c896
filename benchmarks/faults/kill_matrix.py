"""Kill processes, damage checkpoints and cut connections of a federation, and check that nothing is lost.

    python benchmarks/faults/kill_matrix.py [--parts kills sums damages drops] [--lanes 4] [--cells scbf:SJ] [--docs]

100 kills: five processes x five phases of a round x four methods that keep state at the sites or send patches over a
base. 20 kills during masked sums: five processes x four steps of a sum; with one lane, since the length of a site's
certificate differs between federations. 25 damages: after a kill, checkpoints of the server, a site or both are damaged
in five ways. 10 VPN drops: all connections of a site are cut for longer than FLARE's timeouts. An undisturbed run of
each method says what must come out.

Each lane is a provisioned federation of its own on loopback (mTLS, a server and three sites from startup kits, each
with its supervisor), which takes one cell after the other: it lets the job stop in the phase, verifies that it did,
kills the process, waits for the supervisors and submits the same job again. These properties must hold: the final
model is that of the undisturbed run, bit for bit; every message has the planned bytes; every site asked is accounted
for and contributes in every round; no committed round is asked again. After damage, a site that kept a residual which
no other end has may end the run with another model, if its log says that the residual is lost. A drop never aborts
the job: either the round waits, with the same bits, or its record says that the site is missing, and the site comes
back.

SJ: the server's job process. SP+SJ: the server and its job process. CJ: the job process of site-2. CP: site-2's client.
trainer: training has no process of its own, the executor runs in CJ; this target ends CJ from within by
``os._exit(137)``, like an out-of-memory kill. The other kills are SIGKILL.

Each cell is a file of FOLDER/cells; cells that have one are skipped, unless they broke off or ``--again`` is given.
Writes FOLDER/kills.md, and with ``--docs`` the tables of docs/results/faults.md; exits with 1 if a property of a
cell does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kills.cell import PHASES, SUM_PHASES, TARGETS, Kill
from kills.damage import ENDS, VICTIM, WAYS
from kills.drop import Drop
from kills.federation import Federation, wait_for
from kills.jobs import MASKED, METHODS, Result, follow, submit, write_job
from kills.proxy import Proxy
from kills.tables import format_tables, is_broken_off, write_docs

REFERENCE_S = 600.0
"""Longest wait for the undisturbed run of another lane."""


def list_cells() -> dict[str, list[Kill | Drop]]:
    """Return all cells by part."""
    kills = [Kill(method, target, phase) for phase in PHASES for target in TARGETS for method in METHODS]
    later = [phase for phase in PHASES if phase != "before"]
    pairs = [(ends, way) for ends in ENDS for way in WAYS]
    methods = list(METHODS)
    # Stopped in round 3, so that there are two commits; every process, phase and method has its turn.
    damages = [
        Kill(methods[i % 4], TARGETS[(i + i // 5) % 5], later[(i // 4) % 4], 3, ends, way)
        for i, (ends, way) in enumerate(pairs)
    ]
    waiting = [Drop(method, phase, True) for phase in ("training", "sending") for method in METHODS][:6]
    leaving = [Drop(method, phase, False) for method, phase in zip(METHODS, ("training", "sending") * 2, strict=True)]
    sums = [Kill(method, target, phase) for phase in SUM_PHASES for target in TARGETS for method in MASKED]
    return {"drops": [*waiting, *leaving], "kills": [*kills], "sums": [*sums], "damages": [*damages]}


class Lane:
    """One federation after the other, of which only one runs, and the cells that this process has claimed."""

    def __init__(self, number: int, folder: Path, first_port: int):
        self.number, self.folder = number, folder
        self.cells, self.claims = folder / "cells", folder / "claims"
        self._ports = [first_port + 10 * number + i for i in range(5)]
        self._federation: Federation | None = None
        self._proxy: Proxy | None = None

    def claim(self, name: str) -> bool:
        """Return whether this lane is the first to take a cell."""
        try:
            os.close(os.open(self.claims / encode(name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def run(self, cells: list[Kill | Drop]) -> None:
        """Run the cells that no other lane has taken; write a file for each."""
        try:
            for cell in cells:
                if not self.claim(cell.name):
                    continue
                try:
                    outcome = self._run_cell(cell)
                except Exception as error:  # noqa: BLE001 - the other cells run on
                    traceback.print_exc()
                    outcome = {**asdict(cell), "error": f"{type(error).__name__}: {error}"}
                    self._stop()
                (self.cells / f"{encode(cell.name)}.json").write_text(json.dumps(outcome, indent=2) + "\n")
                failed = [name for name, holds in outcome.get("checks", {}).items() if not holds]
                verdict = outcome.get("error") or ("not " + ", not ".join(failed) if failed else "holds")
                print(f"{time.strftime('%H:%M:%S')} lane {self.number} {cell.name}: {verdict}", flush=True)
        finally:
            self._stop()

    def _run_cell(self, cell: Kill | Drop) -> dict[str, Any]:
        federation = self._start(is_drop=isinstance(cell, Drop))
        planned = self._get_reference(cell.method, federation)
        out = self.folder / "jobs" / encode(cell.name)
        out.parent.mkdir(exist_ok=True)
        if isinstance(cell, Drop):
            assert self._proxy is not None
            return cell.run(federation, self._proxy, out, planned)
        return cell.run(federation, out, planned)

    def _start(self, *, is_drop: bool) -> Federation:
        """Return the running federation of a kind; stop the other one."""
        if self._federation is not None and self._federation.has_short_timeouts != is_drop:
            self._stop()
        if self._federation is None:
            kind, ports = ("drops", self._ports[2:4]) if is_drop else ("kills", self._ports[:2])
            folder = self.folder / f"lane-{self.number}" / kind
            folder.mkdir(parents=True, exist_ok=True)
            detours = {VICTIM: self._ports[4]} if is_drop else {}
            if is_drop and self._proxy is None:
                self._proxy = Proxy(self._ports[4], self._ports[2])
            self._federation = Federation(folder, (ports[0], ports[1]), detours, has_short_timeouts=is_drop)
            self._federation.prepare()
        self._federation.start()
        wait_for(self._federation.is_connected, 120, "all sites connected", every=0.3)
        return self._federation

    def _stop(self) -> None:
        if self._federation is not None:
            self._federation.stop()
        self._federation = None

    def _get_reference(self, method: str, federation: Federation) -> Result:
        """Return the record of the undisturbed run of a method, which the first lane that needs it runs."""
        file = self.folder / "references" / f"{method}.json"
        if not file.is_file() and self.claim(f"reference {method}"):
            federation.clear_checkpoints()
            for name in ("armed.json", "reached.json"):
                (federation.faults / name).unlink(missing_ok=True)
            job = submit(federation, write_job(self.folder / "references", method))
            result = follow(federation, job, self.folder / "references" / method)
            part = file.with_suffix(".part")
            part.write_text(json.dumps(asdict(result)))
            part.replace(file)
        wait_for(file.is_file, REFERENCE_S, f"the undisturbed run of {method}", every=0.5)
        return Result(**json.loads(file.read_text()))


def encode(name: str) -> str:
    """Return a cell's name as a file's name."""
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)


def run_lanes(options: argparse.Namespace, folder: Path) -> None:
    """Start one process per lane, since FLARE's admin client keeps state that two sessions would share."""
    for file in (folder / "claims").iterdir():
        file.unlink()
    line = [sys.executable, __file__, *sys.argv[1:]]
    lanes = []
    for number in range(options.lanes):
        with (folder / f"lane-{number}.log").open("a") as log:
            lanes.append(subprocess.Popen([*line, "--lane", str(number)], stderr=log))
        # Clients choose free ports when they start; side by side they would choose the same ones.
        time.sleep(options.stagger)
    for lane in lanes:
        lane.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = list_cells()
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--cells", default="", help="only cells with one of these names or beginnings, by commas")
    parser.add_argument("--folder", type=Path, default=Path("kills"))
    parser.add_argument("--lanes", type=int, default=4, help="federations side by side")
    parser.add_argument("--first-port", type=int, default=18200, help="a lane uses five ports of ten from here")
    parser.add_argument("--stagger", type=float, default=15.0, help="seconds between the starts of two lanes")
    parser.add_argument("--again", action="store_true", help="repeat finished cells")
    parser.add_argument("--only-tables", action="store_true", help="run nothing, write the tables of what has run")
    parser.add_argument("--docs", action="store_true", help="write the tables of --parts into docs/results/faults.md")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    for name in ("cells", "claims", "references"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    chosen = [cell for part in options.parts for cell in parts[part]]
    if options.cells:
        chosen = [cell for cell in chosen if cell.name.startswith(tuple(options.cells.split(",")))]
        if not chosen:
            parser.error(
                f"no such cell: {options.cells}; cells are {', '.join(c.name for p in parts.values() for c in p)}"
            )
    todo = [cell for cell in chosen if options.again or is_broken_off(folder, encode(cell.name))]
    if options.lane is not None:
        # The first lane begins with the drops, which mostly wait, so that they overlap with the kills.
        isolated = [cell for cell in todo if isinstance(cell, Drop)]
        others = [cell for cell in todo if not isinstance(cell, Drop)]
        Lane(options.lane, folder, options.first_port).run(
            isolated + others if options.lane == 0 else others + isolated
        )
        return 0
    if todo and not options.only_tables:
        run_lanes(options, folder)
    outcomes = {
        part: [read_outcome(folder, cell) for cell in cells] for part, cells in parts.items() if part in options.parts
    }
    tables = format_tables(outcomes)
    (folder / "kills.md").write_text(tables)
    print(tables)
    if options.docs:
        write_docs(outcomes)
    results = [read_outcome(folder, cell) for cell in chosen]
    return int(not all(result.get("checks") and all(result["checks"].values()) for result in results))


def read_outcome(folder: Path, cell: Kill | Drop) -> dict[str, Any]:
    """Return what a cell's file says; only the cell itself before it has run."""
    file = folder / "cells" / f"{encode(cell.name)}.json"
    return json.loads(file.read_text()) if file.is_file() else asdict(cell)


if __name__ == "__main__":
    sys.exit(main())
