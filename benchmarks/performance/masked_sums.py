"""Bytes, time and error of sums that the server cannot read against plain ones, for AlexNet3D at 95 % sparsity.

Three sites without data (training adds the same noise in every run) use the real wire: NeuroSFL and dense FedAvg, each
plain and masked, one after the other in one process. The bytes are those of the ledger.

    python benchmarks/performance/masked_sums.py [--sparsity 0.95] [--rounds 5] [--write]

``--write`` writes the table into docs/results/privacy.md. Exits with 1 if padded values take more than 1.05 times 4
bytes a live value, or if the final models differ by more than the precision of the sums allows.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from page_tables import write_section

from flare_sparse.core.params import Layout
from flare_sparse.methods.registry import METHODS
from flare_sparse.privacy.secure_aggregation.rings import Ring
from flare_sparse.privacy.secure_aggregation.stage import SumRules
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.dry_run import DryTrainer
from flare_sparse.rounds.local.run import Course, Transport, run_locally
from flare_sparse.tasks.models import build_model
from flare_sparse.tasks.task import Metric
from flare_sparse.training import Site
from flare_sparse.wire.ledger import Ledger, LedgerLine
from flare_sparse.wire.stage import PLAIN_STAGE

SITES = ("site-1", "site-2", "site-3")
VOLUME = (121, 145, 121)
SUMS = ("plain", "masked")
BOUND = 64.0
LONGEST = 1.05
"""Bound of a masked message with values, over 4 bytes a live value."""


@dataclass(frozen=True)
class Run:
    """A run without data.

    Attributes:
        outcome, ledger: result and messages.
        round_s: median of the seconds between the commits of two training rounds: all sites and the server.
    """

    outcome: Outcome
    ledger: Ledger
    round_s: float

    def count_bytes(self, way: str) -> tuple[int, int]:
        """Return the bytes of the message with values, and of all other messages, of one site in round 2."""
        lines = [
            line
            for line in self.ledger.lines
            if (line.kind, line.round, line.direction, line.site) == ("train", 2, way, SITES[0])
        ]
        largest: LedgerLine = max(lines, key=lambda line: line.scalars_sent)
        return largest.payload_bytes, sum(line.payload_bytes for line in lines if line is not largest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table into docs/results/privacy.md")
    options = parser.parse_args()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = build_model("alexnet3d", volume=VOLUME, outputs=1)
    layout = Layout.from_module(module)
    weights = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
    jobs = {
        "sparse": ("neurosfl", {"sparsity": options.sparsity, "rounds": options.rounds}),
        "dense": ("fedavg", {"rounds": 3}),
    }
    runs = {
        (model, sums): run(name, settings, layout, weights, sums)
        for model, (name, settings) in jobs.items()
        for sums in SUMS
    }
    live = runs["sparse", "plain"].outcome.mask.count
    table = format_table(runs, {"sparse": live, "dense": layout.size})
    print(f"AlexNet3D: {layout.size:,} values, {live:,} live at a sparsity of {options.sparsity:.0%}")
    print(table)
    if options.write:
        write_section("privacy", "secure_sums", table)
    return int(not check_runs(runs, live, options.rounds))


def run(name: str, settings: dict[str, Any], layout: Layout, weights: torch.Tensor, sums: str) -> Run:
    """Run a method without data, with plain or masked sums."""
    method = METHODS[name](METHODS[name].Config.model_validate(settings), layout, 1)
    sites = {site: Site(site, DryTrainer(site, layout, 1)) for site in SITES}
    commits: list[float] = []
    outcome, ledger = run_locally(
        method,
        weights.clone(),
        sites,
        Metric("none", "", "min"),
        course=Course(
            rules=RoundRules(min_sites=len(SITES)), on_round=lambda record: commits.append(time.perf_counter())
        ),
        transport=Transport(stage=SumRules(BOUND) if sums == "masked" else PLAIN_STAGE),
    )
    # The first commit ends the scores or the first round; the last one is the evaluation.
    return Run(outcome, ledger, median(end - begin for begin, end in pairwise(commits[1:-1])))


def format_table(runs: dict[tuple[str, str], Run], values: dict[str, int]) -> str:
    """Return a row per model and way to sum."""
    lines = [
        "| model | sums | values up | other messages up | bytes a value | values down | others down | s a round |",
        "| --- " * 8 + "|",
    ]
    for (model, sums), result in runs.items():
        up, other_up = result.count_bytes("up")
        down, other_down = result.count_bytes("down")
        lines.append(
            f"| {model} | {sums} | {up:,} | {other_up:,} | {up / values[model]:.2f} | {down:,} | {other_down:,} "
            f"| {result.round_s:.2f} |"
        )
    return "\n".join(lines) + "\n"


def check_runs(runs: dict[tuple[str, str], Run], live: int, rounds: int) -> bool:
    """Print the difference between the models; return whether all bounds hold."""
    plain, masked = (runs["sparse", sums].outcome.weights for sums in SUMS)
    largest_value = float(plain.abs().max())
    error = float((masked.double() - plain.double()).abs().max())
    precision = Ring(32, BOUND).compute_error(len(SITES))
    allowed = rounds * 1.5**rounds * (precision + 2.0**-23 * largest_value)
    print(f"masked: largest difference {error:.2g} after {rounds} rounds (values up to {largest_value:.2g})")
    factor = runs["sparse", "masked"].count_bytes("up")[0] / (4 * live)
    print(f"masked: {factor:.4f} times 4 bytes a live value")
    return error <= allowed and factor <= LONGEST


if __name__ == "__main__":
    sys.exit(main())
