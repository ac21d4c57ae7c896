"""What encryption costs on AlexNet3D at 95 % sparsity, and how far an encrypted run ends from the plain one.

Three sites without data (training is noise, the same in every run) go through the real wire: NeuroSFL in the clear and
encrypted, dense FedAvg in the clear and encrypted. The bytes are those of the ledger.

    python benchmarks/encryption.py [--sparsity 0.95] [--rounds 5]

Two result folders of the same job, one encrypted (and decrypted), one not, are compared by

    python benchmarks/encryption.py --runs runs/plain runs/encrypted

Exits with 1 when an encrypted sparse answer is not smaller than a dense one in the clear, or the runs end further apart
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
from flare_sparse.models import build
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
        return compared(*options.runs)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = build("alexnet3d", volume=VOLUME, outputs=1)
    layout = Layout.from_module(module)
    weights = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
    settings = {"sparsity": options.sparsity, "rounds": options.rounds}
    contexts = KeyContexts.generate()
    plain, sparse_plain = run("neurosfl", settings, layout, weights, None)
    began = time.perf_counter()
    secret, sparse = run("neurosfl", settings, layout, weights, contexts)
    seconds = time.perf_counter() - began
    _, dense = run("fedavg", {"rounds": 2}, layout, weights, None)
    _, dense_sealed = run("fedavg", {"rounds": 2}, layout, weights, contexts)
    print(f"AlexNet3D: {layout.size:,} values, {secret.mask.count:,} live at {options.sparsity:.0%} of the weights off")
    print(f"{'a training message':34}{'up':>14}{'down':>14}")
    for name, ledger in (
        ("dense, plain", dense),
        ("dense, encrypted", dense_sealed),
        ("sparse, plain", sparse_plain),
        ("sparse, encrypted", sparse),
    ):
        up, down = (message(ledger, way) for way in ("up", "down"))
        print(f"{name:34}{up:>14,}{down:>14,}")
    cipher = SiteCipher(contexts.client)
    model = Patch(cipher.decrypt(secret.sealed, secret.mask.count), secret.mask).to_vector()
    furthest = float((model.double() - plain.weights.double()).abs().max())
    largest = float(plain.weights.abs().max())
    allowed = options.rounds * 1.5**options.rounds * (PRECISION + 2.0**-23 * largest)
    print(f"largest difference after {options.rounds} rounds: {furthest:.2g} (values up to {largest:.2g})")
    print(f"the encrypted run took {seconds:.1f} s, all {len(SITES)} sites and the server in one process")
    cheaper = message(sparse, "up") < message(dense, "up") and message(sparse, "down") < message(dense, "down")
    return int(not cheaper or furthest > allowed)


def run(
    name: str, settings: dict[str, Any], layout: Layout, weights: torch.Tensor, contexts: KeyContexts | None
) -> Any:
    """Outcome and ledger of a run without data."""
    method = METHODS[name](METHODS[name].Config.model_validate(settings), layout, 1)
    sites = {site: DrySite(site, layout, 1) for site in SITES}
    return run_locally(method, weights.clone(), sites, Metric("none", "", "min"), contexts=contexts)


def message(ledger: Any, way: str) -> int:
    """Bytes of a training message of the second round, when the model that goes down is a sum."""
    train = [line for line in ledger.lines if (line.kind, line.round, line.direction) == ("train", 2, way)]
    return max(int(line.payload_bytes) for line in train)  # ciphertexts differ by a few bytes


def compared(plain: Path, encrypted: Path) -> int:
    """The two models, entry by entry."""
    first, second = (load_file(folder / "model.safetensors") for folder in (plain, encrypted))
    furthest = max(
        float((first[name].double() - second[name].double()).abs().max()) for name in first if first[name].numel()
    )
    print(f"largest difference of the two models: {furthest:.2g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
