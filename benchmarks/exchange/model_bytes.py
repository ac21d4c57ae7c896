"""Bytes of the final model of each method at 90, 95 and 99 % sparsity, against dense files and gzip of them.

    python benchmarks/exchange/model_bytes.py

Each row is a short run on phantoms in this process; what a model weighs depends on which entries are live and not on
how long it was trained. Dense: named float32 tensors, as ``flare-sparse save`` writes them; gzip at level 9.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from pathlib import Path

from typer.testing import CliRunner

import flare_sparse
from flare_sparse.cli import app

TRAINING = "training: {epochs: 1, batch_size: 4, optimizer: adam, lr: 0.001}"
METHODS = {
    "fedavg": "{{name: fedavg, rounds: 1, {training}}}",
    "fedsparsify": "{{name: fedsparsify, sparsity: {sparsity}, rounds: 2, {training}}}",
    "neurosfl": "{{name: neurosfl, sparsity: {sparsity}, rounds: 1, {training}}}",
    "dispfl": "{{name: dispfl, sparsity: {sparsity}, rounds: 1, {training}}}",
    "fawp": "{{name: fawp, pruning_rate: {sparsity}, prunings: 1, rounds: 2, {training}}}",
}
STUDY = """name: size
seed: 1
method: {method}
task: {{name: brain_age, model: {{name: brain_age_cnn_3mm}}, downsample: 2}}
simulator: {{sites: 2, data: {{phantom: {{subjects: 8}}}}}}
"""


def measure(name: str, sparsity: float, folder: Path) -> list[str]:
    """Run a method and return its row: parameters that are live, and bytes of each file."""
    folder.mkdir()
    method = METHODS[name].format(sparsity=sparsity, training=TRAINING)
    (folder / "study.yaml").write_text(STUDY.format(method=method), encoding="utf-8")
    out = folder / "run"
    flare_sparse.run(folder / "study.yaml", env="local", out=out, observer=flare_sparse.Observer())
    site = ["--model", "site-1"] if name == "dispfl" else []
    bytes_by_kind = {}
    for kind, flags in {"dense": [], "sparse": ["--format", "sparse"], "int8": ["--format", "int8"]}.items():
        result = CliRunner().invoke(app, ["save", str(out), "--out", str(folder / kind), *flags, *site])
        assert result.exit_code == 0, result.output
        (file,) = (folder / kind).rglob("*.safetensors")
        bytes_by_kind[kind] = file.stat().st_size
        if kind == "dense":
            bytes_by_kind["gzip"] = len(gzip.compress(file.read_bytes(), 9))
            zeros = flare_sparse.load_model(out, *(["site-1"] if site else []))
    tensors = list(zeros.state_dict().values())
    live = sum(int((tensor != 0).sum()) for tensor in tensors) / sum(tensor.numel() for tensor in tensors)
    order = ("dense", "gzip", "sparse", "int8")
    return [name, f"{100 * sparsity:.0f} %", f"{100 * live:.1f} %", *(f"{bytes_by_kind[kind]:,}" for kind in order)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.95, 0.99])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    print("| method | asked | live | dense | gzip of dense | sparse | int8 |\n" + "| --- " * 7 + "|")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.methods:
            for sparsity in options.sparsities if name != "fedavg" else [0.0]:
                row = measure(name, sparsity, Path(scratch) / f"{name}-{sparsity:g}")
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
