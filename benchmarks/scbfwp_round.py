"""What pruning buys: rounds of a real FLARE job with and without SCBFwP's pruning, 3D brains at two sites.

    python benchmarks/scbfwp_round.py [--rounds 9] [--prunings 6]

Two jobs in FLARE's simulator: ``fawp`` that removes 10 % of the units left after each of the first rounds, from every
layer its share, and the same without pruning. Every entry that is left travels, so the bytes show the structure. Seconds are of whole rounds:
download, training, upload, judging.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from flare_sparse.cli.run import run_in_simulator
from flare_sparse.config import load_config

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "app_configs" / "scbf_brain_age.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prunings", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pruned, whole = (run(Path(folder), arguments.rounds, count) for count in (arguments.prunings, 0))
    print("| round | entries left | MB down | MB up | seconds | unpruned: MB down | MB up | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, (small, large) in enumerate(zip(training(pruned), training(whole), strict=True), start=1):
        print(
            f"| {number} | {1 - small['sparsity']:.0%} | {small['bytes_down'] / 1e6:.2f} | {small['bytes_up'] / 1e6:.2f} "
            f"| {small['seconds']:.2f} | {large['bytes_down'] / 1e6:.2f} | {large['bytes_up'] / 1e6:.2f} "
            f"| {large['seconds']:.2f} |"
        )
    after = [line["seconds"] for line in training(pruned)[arguments.prunings :]]
    before = [line["seconds"] for line in training(whole)[arguments.prunings :]]
    counting = [line["seconds"] for line in pruned if line["kind"] == "count"]
    print(
        f"median round after the last pruning: {median(after):.2f} s, unpruned {median(before):.2f} s, ratio "
        f"{median(after) / median(before):.2f}; a count of zeros takes {median(counting):.2f} s"
    )
    return 0


def run(folder: Path, rounds: int, prunings: int) -> list[dict[str, Any]]:
    """The lines of ``rounds.jsonl``."""
    training = "{epochs: 2, batch_size: 8, optimizer: adam, lr: 1e-3}"
    config = load_config(
        CONFIG,
        [
            f"method={{name: fawp, prunings: {prunings}, ranking: layer, rounds: {rounds}, training: {training}}}",
            "task.downsample=1",
            "simulator={sites: 2, data: {phantom: {subjects: 40}}}",
            "federation.min_sites=2",
        ],
    )
    out = folder / f"pruned-{prunings}"
    run_in_simulator(config, CONFIG, out, Console(quiet=True))
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


def training(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "train"]


if __name__ == "__main__":
    sys.exit(main())
