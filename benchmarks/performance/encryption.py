"""Bytes and error of encrypted runs against plain ones, for AlexNet3D at 95 % sparsity.

Three sites without data (training adds the same noise in every run) use the real wire: NeuroSFL plain and encrypted,
dense FedAvg plain and encrypted. The bytes are those of the ledger.

    python benchmarks/performance/encryption.py [--sparsity 0.95] [--rounds 5]

Compare two result folders of the same job, one plain, one encrypted and decrypted since:

    python benchmarks/performance/encryption.py --runs runs/plain runs/encrypted

Exits with 1 if an encrypted sparse update is not smaller than a plain dense one, or if the final models differ by more
than the precision of the sums allows.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flare_sparse.encryption import PRECISION, KeyContexts, SiteCipher
from flare_sparse.exchange import Patch
from flare_sparse.local.dry_run import DrySite
from flare_sparse.local.run import run_locally
from flare_sparse.methods import METHODS
from flare_sparse.models import build_model
from flare_sparse.params import Layout
from flare_sparse.task import Metric

SITES = ("site-1", "site-2", "site-3")
VOLUME = (121, 145, 121)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", nargs=2, type=Path, metavar=("PLAIN", "ENCRYPTED"))
    options = parser.parse_args()
    if options.runs:
        return compare_runs(*options.runs)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = build_model("alexnet3d", volume=VOLUME, outputs=1)
    layout = Layout.from_module(module)
    weights = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
    settings = {"sparsity": options.sparsity, "rounds": options.rounds}
    contexts = KeyContexts.generate()
    plain, sparse_plain = run("neurosfl", settings, layout, weights, None)
    began = time.perf_counter()
    encrypted, sparse = run("neurosfl", settings, layout, weights, contexts)
    seconds = time.perf_counter() - began
    _, dense = run("fedavg", {"rounds": 2}, layout, weights, None)
    _, dense_encrypted = run("fedavg", {"rounds": 2}, layout, weights, contexts)
    print(f"AlexNet3D: {layout.size:,} values, {encrypted.mask.count:,} live at a sparsity of {options.sparsity:.0%}")
    print(f"{'training message':34}{'up':>14}{'down':>14}")
    for name, ledger in (
        ("dense, plain", dense),
        ("dense, encrypted", dense_encrypted),
        ("sparse, plain", sparse_plain),
        ("sparse, encrypted", sparse),
    ):
        up, down = (count_bytes(ledger, way) for way in ("up", "down"))
        print(f"{name:34}{up:>14,}{down:>14,}")
    cipher = SiteCipher(contexts.client)
    model = Patch(cipher.decrypt(encrypted.encrypted, encrypted.mask.count), encrypted.mask).to_vector()
    largest_error = float((model.double() - plain.weights.double()).abs().max())
    largest_value = float(plain.weights.abs().max())
    allowed = options.rounds * 1.5**options.rounds * (PRECISION + 2.0**-23 * largest_value)
    print(f"largest difference after {options.rounds} rounds: {largest_error:.2g} (values up to {largest_value:.2g})")
    print(f"the encrypted run took {seconds:.1f} s, all {len(SITES)} sites and the server in one process")
    cheaper = count_bytes(sparse, "up") < count_bytes(dense, "up") and count_bytes(sparse, "down") < count_bytes(
        dense, "down"
    )
    return int(not cheaper or largest_error > allowed)


def run(
    name: str, settings: dict[str, Any], layout: Layout, weights: torch.Tensor, contexts: KeyContexts | None
) -> Any:
    """Return outcome and ledger of a run without data."""
    method = METHODS[name](METHODS[name].Config.model_validate(settings), layout, 1)
    sites = {site: DrySite(site, layout, 1) for site in SITES}
    return run_locally(method, weights.clone(), sites, Metric("none", "", "min"), contexts=contexts)


def count_bytes(ledger: Any, way: str) -> int:
    """Return the bytes of a training message of round 2, in which the model sent down is an encrypted sum."""
    train = [line for line in ledger.lines if (line.kind, line.round, line.direction) == ("train", 2, way)]
    # Ciphertexts differ by a few bytes.
    return max(int(line.payload_bytes) for line in train)


def compare_runs(plain: Path, encrypted: Path) -> int:
    """Print the largest difference between two models."""
    first, second = (load_file(folder / "model.safetensors") for folder in (plain, encrypted))
    largest_error = max(
        float((first[name].double() - second[name].double()).abs().max()) for name in first if first[name].numel()
    )
    print(f"largest difference of the two models: {largest_error:.2g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
