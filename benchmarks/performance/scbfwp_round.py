"""Time and bytes of rounds with and without SCBFwP's pruning, in FLARE jobs over 3D brains at two sites.

    python benchmarks/performance/scbfwp_round.py [--rounds 9] [--prunings 6]

Two jobs in FLARE's simulator: ``fawp``, which removes 10 % of the remaining units of every layer after each of the
first rounds, and the same job without pruning. Every live entry is sent, so the bytes show the structure. Seconds are
those of whole rounds: download, training, upload, evaluation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from flare_sparse.api.start import launch
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "app_configs" / "scbf_brain_age.yaml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prunings", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pruned, unpruned = (run(Path(folder), arguments.rounds, count) for count in (arguments.prunings, 0))
    print("| round | live entries | MB down | MB up | seconds | unpruned: MB down | MB up | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, (small, large) in enumerate(zip(list_training(pruned), list_training(unpruned), strict=True), start=1):
        print(
            f"| {number} | {1 - small['sparsity']:.0%} "
            f"| {small['bytes_down'] / 1e6:.2f} | {small['bytes_up'] / 1e6:.2f} | {small['seconds']:.2f} "
            f"| {large['bytes_down'] / 1e6:.2f} | {large['bytes_up'] / 1e6:.2f} | {large['seconds']:.2f} |"
        )
    pruned_s = median(line["seconds"] for line in list_training(pruned)[arguments.prunings :])
    unpruned_s = median(line["seconds"] for line in list_training(unpruned)[arguments.prunings :])
    count_s = median(line["seconds"] for line in pruned if line["kind"] == "count")
    print(
        f"median round after the last pruning: {pruned_s:.2f} s, unpruned {unpruned_s:.2f} s, "
        f"ratio {pruned_s / unpruned_s:.2f}; a count of zeros takes {count_s:.2f} s"
    )
    return 0


def run(folder: Path, rounds: int, prunings: int) -> list[dict[str, Any]]:
    """Run a job; return the lines of its ``rounds.jsonl``."""
    training = "{epochs: 2, batch_size: 8, optimizer: adam, lr: 1e-3}"
    config = load_config(
        CONFIG,
        [
            f"method={{name: fawp, prunings: {prunings}, rounds: {rounds}, training: {training}}}",
            "task.downsample=1",
            "simulator={sites: 2, data: {phantom: {subjects: 40}}}",
            "federation.min_sites=2",
        ],
    )
    out = folder / f"pruned-{prunings}"
    launch("sim", Study(config, CONFIG), RunFolder(out))
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


def list_training(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "train"]


if __name__ == "__main__":
    sys.exit(main())
