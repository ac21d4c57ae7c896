"""Sparse kernels against torch's dense computation, by layer and by network, in one run.

    python benchmarks/performance/kernels.py [--quick] [--json FILE] [--docs] [--minutes M]

Every repeat times the dense and the sparse variant one after the other; each figure is the fastest of the repeats, and
the ratio is of these two. Inference is also timed with ONNX Runtime, dense. Each line has:

* what: ``layer`` (forward and backward of one convolution), ``training`` (forward and backward of a network) or
  ``inference``;
* network, sparsity, pattern of the mask (uniform, erk, snip or fedsparsify), threads;
* dense_s, sparse_s, ratio, and onnx_s for inference.

``--quick`` times few repeats of the smaller networks at two sparsities. What is in ``--json`` already is not timed
again. ``--docs`` adds the lines to docs/results/kernels.csv, those of two threads below those of one. With
both cores idle, ``--threads 2 --networks brain_age_cnn --json FILE --docs`` takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels_table import merge_lines, update_table
from torch import Tensor, nn

from flare_sparse.compute.kernels.cost import is_sparse_faster
from flare_sparse.compute.kernels.network import Decide, use_sparse_kernels
from flare_sparse.core.seeds import limit_threads
from flare_sparse.tasks.models.brain_age import alexnet3d, brain_age_cnn, brain_age_cnn_3mm

TABLE = Path(__file__).resolve().parents[2] / "docs" / "results" / "kernels.csv"
SPARSITIES = (0.8, 0.9, 0.95, 0.98, 0.99)
PATTERNS = ("uniform", "erk", "snip", "fedsparsify")


@dataclass(frozen=True)
class Bench:
    """A network and the input that it is timed with."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


def build_unet() -> nn.Module:
    from monai.networks.nets import BasicUNet

    return BasicUNet(spatial_dims=3, in_channels=1, out_channels=3, features=(16, 16, 32, 64, 128, 16))


NETWORKS = (
    Bench("brain_age_cnn 91x109x91", brain_age_cnn, (1, 1, 91, 109, 91)),
    Bench("brain_age_cnn_3mm 26x32x26", brain_age_cnn_3mm, (8, 1, 26, 32, 26)),
    Bench("alexnet3d 121x145x121", alexnet3d, (2, 1, 121, 145, 121)),
    Bench("3D U-Net 40x56x40", build_unet, (2, 1, 48, 64, 48)),
)
QUICK = ("brain_age_cnn 91x109x91", "brain_age_cnn_3mm 26x32x26")
LAYERS = (
    (32, 64, (45, 54, 45)),
    (64, 128, (22, 27, 22)),
    (128, 256, (11, 13, 11)),
    (256, 256, (5, 6, 5)),
    (16, 32, (26, 32, 26)),
)


def draw_mask(network: nn.Module, sparsity: float, pattern: str, inputs: Tensor) -> dict[str, Tensor]:
    """Set the weights that a mask switches off to 0; return the live ones by name.

    ``uniform``: the same share in every layer, at random. ``erk``: at random by Erdos-Renyi-kernel densities. ``snip``:
    the largest ``|w * gradient|`` of a sum of outputs. ``fedsparsify``: the largest magnitudes.
    """
    weights = {name: p for name, p in network.named_parameters() if p.dim() > 1}
    if pattern in ("snip", "fedsparsify"):
        return select_by_score(network, weights, sparsity, pattern, inputs)
    densities = dict.fromkeys(weights, 1 - sparsity)
    if pattern == "erk":
        densities = compute_erk_densities(weights, 1 - sparsity)
    live = {name: torch.rand(p.shape) < densities[name] for name, p in weights.items()}
    zero_masked_weights(weights, live)
    return live


def compute_erk_densities(weights: dict[str, nn.Parameter], density: float) -> dict[str, float]:
    """Return densities proportional to ``sum(shape) / prod(shape)``, at most 1 (Evci et al. 2020, appendix A)."""
    raw = {name: sum(p.shape) / p.numel() for name, p in weights.items()}
    full: set[str] = set()
    while True:
        budget = density * sum(p.numel() for p in weights.values()) - sum(weights[name].numel() for name in full)
        factor = budget / sum(raw[name] * p.numel() for name, p in weights.items() if name not in full)
        over = {name for name in weights if name not in full and raw[name] * factor > 1}
        if not over:
            return {name: 1.0 if name in full else raw[name] * factor for name in weights}
        full |= over


def select_by_score(
    network: nn.Module, weights: dict[str, nn.Parameter], sparsity: float, pattern: str, inputs: Tensor
) -> dict[str, Tensor]:
    """Set the weights with the lowest scores to 0; return the live ones by name."""
    scores = {name: p.detach().abs() for name, p in weights.items()}
    if pattern == "snip":
        network.train()
        network(inputs).square().sum().backward()
        scores = {name: (p * p.grad).abs().detach() for name, p in weights.items() if p.grad is not None}
        network.zero_grad(set_to_none=True)
    ordered = torch.cat([score.flatten() for score in scores.values()]).sort(descending=True).values
    threshold = ordered[int(len(ordered) * (1 - sparsity))]
    live = {name: score > threshold for name, score in scores.items()}
    zero_masked_weights(weights, live)
    return live


def zero_masked_weights(weights: dict[str, nn.Parameter], live: dict[str, Tensor]) -> None:
    """Set the weights that are not live to 0."""
    for name, bits in live.items():
        weights[name].data.mul_(bits)


def time_both(
    network: nn.Module,
    live: dict[str, Tensor],
    step: Callable[[], object],
    repeats: int,
    decide: Decide = is_sparse_faster,
) -> tuple[float, float]:
    """Return the fastest seconds of the dense and the sparse variant, timed in turn."""
    dense, sparse = [], []
    with use_sparse_kernels(network, live, decide):
        step()
        step()
    for _ in range(repeats):
        dense.append(time_call(step))
        with use_sparse_kernels(network, live, decide):
            # The first pass of a context sorts the live weights; in training it is one of many.
            step()
            sparse.append(time_call(step))
    return min(dense), min(sparse)


def time_call(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def time_onnx(network: nn.Module, inputs: Tensor, threads: int, repeats: int) -> float | None:
    """Return the fastest seconds of ONNX Runtime; None if it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        torch.onnx.export(network, (inputs,), str(file), dynamo=False, input_names=["x"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(file), options)
        feed = {"x": inputs.numpy()}
        return min(time_call(lambda: session.run(None, feed)) for _ in range(repeats + 1))


@dataclass(frozen=True)
class Group:
    """Lines that are timed together: those of one layer or network with one mask.

    Attributes:
        bench: the network; None: a single layer.
        name: name of the network or layer in the lines.
        sparsity: share of the weights that are off.
        pattern: how the mask is drawn.
        layer: inputs, outputs and size of the volume of a single layer.
    """

    bench: Bench | None
    name: str
    sparsity: float
    pattern: str
    layer: tuple[int, int, tuple[int, ...]] | None = None

    @property
    def size(self) -> int:
        """Number of lines: training, and inference for each size of a batch."""
        return 1 if self.bench is None else 1 + len({1, self.bench.shape[0]})

    def time(self, threads: int, repeats: int) -> Iterator[dict[str, Any]]:
        """Yield the lines."""
        torch.manual_seed(0)
        return self._time_layer(threads, repeats) if self.bench is None else self._time_network(threads, repeats)

    def _time_layer(self, threads: int, repeats: int) -> Iterator[dict[str, Any]]:
        assert self.layer is not None
        inputs, outputs, shape = self.layer
        network = nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1))
        x = torch.randn(1, inputs, *shape, requires_grad=True)
        live = draw_mask(network, self.sparsity, self.pattern, x)
        seconds = time_both(network, live, lambda: network(x).sum().backward(), repeats, lambda _: True)
        yield self._build_line("layer", threads, *seconds)

    def _time_network(self, threads: int, repeats: int) -> Iterator[dict[str, Any]]:
        assert self.bench is not None
        network = self.bench.build()
        inputs = torch.randn(self.bench.shape)
        live = draw_mask(network, self.sparsity, self.pattern, inputs)
        network.train()
        seconds = time_both(network, live, partial(train_step, network, inputs), repeats)
        yield self._build_line("training", threads, *seconds)
        network.eval()
        for batch in sorted({1, len(inputs)}):
            x = inputs[:batch]
            seconds = time_both(network, live, partial(infer, network, x), repeats)
            line = self._build_line("inference", threads, *seconds)
            yield {**line, "batch": batch, "onnx_s": time_onnx(network, x, threads, repeats)}

    def _build_line(self, what: str, threads: int, dense: float, sparse: float) -> dict[str, Any]:
        return {
            "what": what,
            "network": self.name,
            "sparsity": self.sparsity,
            "pattern": self.pattern,
            "threads": threads,
            "dense_s": dense,
            "sparse_s": sparse,
            "ratio": dense / sparse,
        }


def list_groups(options: argparse.Namespace) -> list[Group]:
    """Return what the options ask for: layers, unless networks are chosen, and networks."""
    sparsities = (0.9, 0.95) if options.quick else tuple(options.sparsities)
    patterns = ("uniform",) if options.quick else tuple(options.patterns)
    chosen = [b for b in NETWORKS if not options.networks or b.name.startswith(tuple(options.networks))]
    chosen = [b for b in chosen if not options.quick or b.name in QUICK]
    layers = [
        Group(None, f"{inputs}->{outputs}, {'x'.join(map(str, shape))}", sparsity, "uniform", (inputs, outputs, shape))
        for inputs, outputs, shape in (() if options.networks else LAYERS)
        for sparsity in sparsities
    ]
    return layers + [
        Group(b, b.name, sparsity, pattern) for b in chosen for pattern in patterns for sparsity in sparsities
    ]


def train_step(network: nn.Module, inputs: Tensor) -> None:
    network.zero_grad(set_to_none=True)
    network(inputs).sum().backward()


@torch.no_grad()
def infer(network: nn.Module, inputs: Tensor) -> Tensor:
    output: Tensor = network(inputs)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats, two networks, two sparsities, one thread")
    parser.add_argument("--json", type=Path, help="lines of this run, and of earlier ones")
    parser.add_argument("--docs", action="store_true", help="add the lines to docs/results/kernels.csv")
    parser.add_argument("--minutes", type=float, default=None, help="time no further network after this time")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of torch threads")
    parser.add_argument("--networks", nargs="+", default=[], help="only networks whose name begins with one of these")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS, help="only these masks")
    parser.add_argument("--sparsities", type=float, nargs="+", default=SPARSITIES, help="only these sparsities")
    options = parser.parse_args()
    threads, repeats = ([1], 2) if options.quick else (options.threads, 5)
    lines = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    timed = Counter((line["network"], line["sparsity"], line["pattern"], line["threads"]) for line in lines)
    began = time.monotonic()
    for count in threads:
        with limit_threads(count):
            for group in list_groups(options):
                is_late = options.minutes is not None and time.monotonic() - began > 60 * options.minutes
                if is_late or timed[group.name, group.sparsity, group.pattern, count] >= group.size:
                    continue
                for line in group.time(count, repeats):
                    print(json.dumps(line), flush=True)
                    lines = merge_lines(lines, [line])
                    if options.json:
                        options.json.write_text(json.dumps(lines, indent=1) + "\n")
    if options.docs:
        TABLE.write_text(update_table(TABLE.read_text(), lines))


if __name__ == "__main__":
    main()
