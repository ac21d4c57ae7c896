"""Bytes at the server of 1,000 sites, flat and through 8 hubs of 125 sites, and whether both end in the same bits.

Sites without data (training adds noise that differs from site to site) use the real wire in one process: every
request, reply, collection and sum is encoded, checked and decoded. The bytes are those of the ledger.

    python benchmarks/performance/hubs.py [--hubs 8] [--sites 125] [--rounds 1] [--sparsity 0.9]

Exits with 1 if the two final models differ in a bit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping

import torch
from torch import nn

from flare_sparse.core.params import Layout, compute_digest
from flare_sparse.methods.registry import METHODS
from flare_sparse.privacy.secure_aggregation.limits import SumRules
from flare_sparse.rounds.federation import HubRules, RoundRules
from flare_sparse.rounds.federation.tree import sum_link_bytes
from flare_sparse.rounds.local.dry_run import DryTrainer
from flare_sparse.rounds.local.run import Course, Transport, run_locally
from flare_sparse.tasks.task import Metric
from flare_sparse.training import Site


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hubs", type=int, default=8)
    parser.add_argument("--sites", type=int, default=125, help="sites of each hub")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--features", type=int, default=256, help="inputs of the network, which decide its size")
    options = parser.parse_args()
    names = [f"site-{number + 1:04d}" for number in range(options.hubs * options.sites)]
    hubs = {
        f"hub-{hub + 1}": HubRules(tuple(names[hub * options.sites : (hub + 1) * options.sites]))
        for hub in range(options.hubs)
    }
    flat, flat_bytes = run(options, names, {})
    tree, tree_bytes = run(options, names, hubs)
    print(
        f"\n| bytes at the server | flat, {len(names)} sites | {options.hubs} hubs of {options.sites} | flat / tree |"
    )
    print("| --- | --- | --- | --- |")
    for direction, label in (("down", "sent"), ("up", "received")):
        first, second = flat_bytes["server"][direction], tree_bytes["server"][direction]
        print(f"| {label} | {first:,} | {second:,} | {first / second:.1f} |")
    largest = {d: max(links[d] for name, links in tree_bytes.items() if name != "server") for d in ("down", "up")}
    print(f"\nA hub sent at most {largest['down']:,} bytes to its sites and received {largest['up']:,} from them.")
    print(f"Final models: flat {flat[:16]}, tree {tree[:16]}: {'equal' if flat == tree else 'DIFFERENT'}")
    return 0 if flat == tree else 1


def run(
    options: argparse.Namespace, names: list[str], hubs: Mapping[str, HubRules]
) -> tuple[str, dict[str, dict[str, int]]]:
    """Return the digest of the final model and the bytes of each link."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(options.features, 64), nn.ReLU(), nn.Linear(64, 1))
    layout = Layout.from_module(module)
    weights = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
    neurosfl = METHODS["neurosfl"]
    settings = {"rounds": options.rounds, "sparsity": options.sparsity}
    method = neurosfl(neurosfl.Config.model_validate(settings), layout, 1)
    # Unequal numbers of examples: with equal ones, an error in the weights would not show.
    sites = {name: Site(name, DryTrainer(name, layout, examples=50 + 37 * k % 411)) for k, name in enumerate(names)}
    began = time.perf_counter()
    outcome, ledger = run_locally(
        method,
        weights,
        sites,
        Metric("none", "", "min"),
        course=Course(rules=RoundRules(min_sites=len(names))),
        transport=Transport(sum_rules=SumRules(64.0, is_padded=False), hubs=hubs),
    )
    seconds = time.perf_counter() - began
    shape = f"{len(hubs)} hubs" if hubs else "no hubs"
    live = outcome.mask.count
    print(f"{len(names)} sites, {shape}, {layout.size:,} parameters, {live:,} live: {seconds:.1f} s", flush=True)
    return compute_digest(outcome.weights), sum_link_bytes(ledger.lines, hubs)


if __name__ == "__main__":
    sys.exit(main())
