"""Time until the model of brain_t1.py has a given error, on links of 10, 100 and 1,000 Mbit/s.

    python benchmarks/experiments/brain_link.py ../shared/data/brain_t1 [--folds 1 2 3] [--out runs/brain_link] [--docs]

Computed, not measured on links: bytes of the messages and seconds of the sites are those of a run in one process on one
core, and sites compute and exchange side by side, each over a link of its own. The error is that of the global model,
the mean over the folds of one seed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from brain_t1 import MAIN, Volumes, run
from page_tables import write_section
from runs import claim

from flare_sparse.core.checkpoint.writing import write_json

SITES, ROUNDS, SEED = 5, 30, 1
RATES = (10, 100, 1000)
ARMS = [arm for arm in MAIN if arm.sites == "all" and "95" not in arm.label]
ERRORS = (9.0, 8.0)
"""Years."""


def find_time(row: dict[str, Any], error: float, rate: float) -> float | None:
    """Return the seconds until the model has an error, in years, over links of a rate in Mbit/s; None: it never has."""
    compute = row["seconds"] / SITES / ROUNDS
    for number, (sent, found) in enumerate(row["curve"]):
        if found <= error:
            return number * compute + 8 * sent / SITES / rate / 1e6
    return None


def build_cell(rows: Sequence[dict[str, Any]], error: float, rate: float) -> str:
    """Return the mean over folds that reach an error, and how many do not."""
    times = [find_time(row, error, rate) for row in rows]
    reached = [time for time in times if time is not None]
    missing = f", {len(times) - len(reached)} of {len(times)} never" if len(reached) < len(times) else ""
    return f"{sum(reached) / len(reached):.2f} s{missing}" if reached else "never"


def main() -> None:
    """Run the arms that have no file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the BIDS data sets IXI-HH and NSK")
    parser.add_argument("--folds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, default=Path("runs/brain_link"))
    parser.add_argument("--docs", action="store_true", help="update docs/results/age.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    volumes, head = Volumes(arguments.data), [f"{error:g} years, {rate:,} Mbit/s" for error in ERRORS for rate in RATES]
    lines = [f"| | {' | '.join(head)} |", "| --- " * (1 + len(head)) + "|"]
    for arm in ARMS:
        files = [arguments.out / f"{arm.file_name}_{fold}.json" for fold in arguments.folds]
        for fold, file in zip(arguments.folds, files, strict=True):
            with claim(file) as is_claimed:
                if is_claimed:
                    began = time.process_time()
                    row = run(arm, SEED, fold, arguments.data, volumes)
                    # Of the processor, which other work on the machine does not lengthen.
                    write_json(file, {**row, "seconds": time.process_time() - began})
        rows = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        cells = [build_cell(rows, error, rate) for error in ERRORS for rate in RATES]
        lines.append(f"| {arm.label} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if arguments.docs:
        write_section("age", "brain_link", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
