"""Run every configuration for a few rounds in one process each, and print the sha256 of the model that it ends with.

Two trees compute the same where their digests are equal:

    python benchmarks/structure/digest_configurations.py --data DATA --out before.json   # in the one tree
    python benchmarks/structure/digest_configurations.py --data DATA --out after.json --against before.json

Two runs with differential privacy differ on any tree, because the noise comes from a secret of each site. On trees
before commit 10ae409, kernels that are just compiled and kernels from the cache compute other bits: run each
configuration by itself there, with a fresh $NUMBA_CACHE_DIR. Text encoders are found in $FLARE_SPARSE_MODELS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

from flare_sparse.results.runs.load import load_study
from flare_sparse.results.runs.model_files import read_mask, read_model

ROOT = Path(__file__).resolve().parents[2]


def digest_model(folder: Path) -> dict[str, str]:
    """Return the sha256 of the weights and of the live entries of each model at the top of a run's folder, by name."""
    layout, found = load_study(folder).assembly.layout, {}
    for path in sorted(folder.glob("*model.safetensors")):
        found[path.name] = digest_tensors(layout.unflatten(read_model(path, layout)))
        mask = path.name.replace("model", "mask")
        found[mask] = digest_tensors(layout.unflatten(read_mask(path, layout).bits))
    return found


def digest_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """Return the sha256 of name, type, shape and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def locate_data(config: Path, data: Path | None) -> list[str]:
    """Return the options that point a configuration to its data set, found below ``data`` by the name of its path.

    Where two data sets have a file of that name, the one of the folder that most resembles the configuration's name
    and path is taken.
    """
    path = yaml.safe_load(config.read_text(encoding="utf-8")).get("simulator", {}).get("data", {}).get("path")
    if path is None or data is None:
        return []
    wanted = set(re.split(r"[^a-z0-9]+", f"{config.stem} {config.read_text(encoding='utf-8')}".lower()))

    def rank(place: Path) -> tuple[int, int, str]:
        words = re.split(r"[^a-z0-9]+", str(place.relative_to(data)).lower())
        return -len(wanted & set(words)), len(place.parts), str(place)

    found = sorted(data.rglob(path), key=rank)
    return ["--set", f"simulator.data.path={found[0]}"] if found else []


def run_configuration(config: Path, options: argparse.Namespace) -> dict[str, str]:
    """Run a configuration in the environment ``local``; return its digests, or ``{"error": text}``."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        start = [sys.executable, "-c", "from flare_sparse.cli import app; app()", "run", str(config), "--env", "local"]
        line = [
            *start,
            "--out",
            str(out),
            "--set",
            f"method.rounds={options.rounds}",
            *locate_data(config, options.data),
        ]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=options.timeout, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"no end within {options.timeout:g} s"}
        if done.returncode:
            return {"error": (done.stderr or done.stdout).strip()[-300:]}
        return digest_model(out)


def compare_digests(found: dict[str, dict[str, str]], before: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Return the names of the configurations that are equal, different, or lack a digest in one of the trees."""
    groups: dict[str, list[str]] = {"equal": [], "different": [], "no reference": []}
    for name, digests in found.items():
        own, other = digests, before.get(name, {"error": ""})
        kind = "no reference" if "error" in own or "error" in other else "equal" if own == other else "different"
        groups[kind].append(name)
    return groups


def main() -> None:
    """Run the configurations, and compare their digests with those of another tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path, help="configurations; all of app_configs/ by default")
    parser.add_argument("--data", type=Path, help="folder below which the data sets of the configurations lie")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each run (default 2)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one run (default 300)")
    parser.add_argument("--out", type=Path, help="JSON file of the digests")
    parser.add_argument("--against", type=Path, help="digests of another tree; the exit code is 1 if any differ")
    options = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    for config in options.configs or sorted((ROOT / "app_configs").glob("*.yaml")):
        start = time.monotonic()
        found[config.stem] = run_configuration(config.resolve(), options)
        print(f"{config.stem}: {found[config.stem]} ({time.monotonic() - start:.0f} s)", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.against:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        groups = compare_digests(found, before)
        print("; ".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in groups.items()))
        sys.exit(bool(groups["different"]))


if __name__ == "__main__":
    main()
