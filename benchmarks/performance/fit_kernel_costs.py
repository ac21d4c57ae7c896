"""Fit the cost model of the sparse kernels to this machine, and say how good its choices are.

    python benchmarks/performance/fit_kernel_costs.py [--threads 2] [--networks brain_age_cnn_3mm] [--repeats 3]

Times every block of the networks of ``kernels.py``, dense and sparse in turn, in training and in inference, at
densities from 1 to 100 %. Two threads need two idle cores. Fits the nanoseconds of each operation by non-negative least
squares, and prints them as the constants of ``kernels/cost.py``. For both the fitted and the present constants it
prints what wrong choices cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from kernels import NETWORKS, Bench, infer, time_both
from scipy.optimize import nnls
from torch import Tensor, nn

from flare_sparse.compute.kernels.chains import find_chains
from flare_sparse.compute.kernels.cost import Costs, Work, count_dense_operations, count_sparse_operations, get_costs
from flare_sparse.core.seeds import limit_threads

DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
Timing = tuple[Work, float, float]
"""What a block computes, and the seconds of its dense and its sparse computation."""


def record_inputs(network: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return the input of each layer in a forward pass, by name of the layer."""
    seen: dict[str, Tensor] = {}

    def record_input(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        seen.setdefault(name, args[0].detach())

    hooks = [module.register_forward_pre_hook(partial(record_input, name)) for name, module in network.named_modules()]
    with torch.no_grad():
        network(inputs)
    for hook in hooks:
        hook.remove()
    return seen


def time_blocks(bench: Bench, densities: tuple[float, ...], repeats: int) -> Iterator[Timing]:
    """Yield the times of each block of a network at each density, in training and in inference."""
    torch.manual_seed(0)
    network = bench.build()
    inputs = record_inputs(network, torch.randn(bench.shape))
    for chain in find_chains(network):
        block = nn.Sequential(chain.layer, *chain.followers)
        x = inputs[chain.name]
        for density in densities:
            live = {"0.weight": torch.rand(chain.layer.weight.shape) < density}
            for is_training in (True, False):
                yield time_block(block.train(is_training), x, live, repeats)


def time_block(block: nn.Sequential, x: Tensor, live: dict[str, Tensor], repeats: int) -> Timing:
    """Return the fastest times of a block, dense and sparse in turn."""
    works: list[Work] = []

    def decide(work: Work) -> bool:
        works.append(work)
        return True

    step = partial(train if block.training else predict, block, x)
    dense, sparse = time_both(block, live, step, repeats, decide)
    return works[0], dense, sparse


class WakeThreads(torch.autograd.Function):
    """Return the input; start torch's threads in both passes, as the layers before and after a block do.

    Without it, torch's threads might sleep when the dense or the sparse variant begins; in a network they do not.
    """

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        SCRATCH.add_(1)
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        SCRATCH.add_(1)
        return grad


SCRATCH = torch.zeros(1 << 17)
"""Values that torch divides among its threads; to add to them takes some 10 microseconds."""


def train(block: nn.Module, x: Tensor) -> None:
    wake: Any = WakeThreads.apply
    wake(block(wake(x.detach().requires_grad_()))).sum().backward()


def predict(block: nn.Module, x: Tensor) -> None:
    SCRATCH.add_(1)
    infer(block, x)


def fit_costs(counts: list[tuple[int, ...]], seconds: list[float]) -> tuple[float, ...]:
    """Return the nanoseconds of each operation that explain the times best.

    The errors are divided by ``time**0.8``: by the time itself, large layers, which decide what a network takes, would
    count too little; by 1, small ones.
    """
    times = np.array(seconds) * 1e9
    weights = times**-0.8
    matrix = np.array(counts, float) * weights[:, None]
    # Columns of like size: counts of operations reach 1e11, those of starts are 1.
    scale = np.maximum(matrix.max(axis=0), 1e-30)
    solution = nnls(matrix / scale, times * weights)[0] / scale
    return tuple(float(f"{cost:.4g}") for cost in solution)


def describe_regret(timings: list[Timing], costs: Costs) -> str:
    """Return how much longer all blocks take than with the faster variant of each, and the largest factors of one."""
    chosen, fastest, too_sparse, too_dense = 0.0, 0.0, 1.0, 1.0
    for work, dense, sparse in timings:
        is_sparse = costs.is_sparse_faster(work)
        chosen += sparse if is_sparse else dense
        fastest += min(dense, sparse)
        if is_sparse:
            too_sparse = max(too_sparse, sparse / dense)
        else:
            too_dense = max(too_dense, dense / sparse)
    return (
        f"all blocks {chosen / fastest:.3f} times the fastest; one computed sparsely at most {too_sparse:.2f} times "
        f"the dense, one left dense at most {too_dense:.2f} times the sparse"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=[], help="only networks whose name begins with one of these")
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads")
    options = parser.parse_args()
    chosen = [b for b in NETWORKS if not options.networks or b.name.startswith(tuple(options.networks))]
    timings: list[Timing] = []
    with limit_threads(options.threads):
        for bench in chosen:
            timings += time_blocks(bench, tuple(options.densities), options.repeats)
            print(f"{bench.name}: {len(timings)} times so far", flush=True)
    for name, is_training in (("INFERENCE", False), ("TRAINING", True)):
        present = get_costs(is_training=is_training, threads=options.threads)
        part = [timing for timing in timings if timing[0].is_training == is_training]
        fitted = Costs(
            fit_costs([count_dense_operations(work) for work, _, _ in part], [dense for _, dense, _ in part]),
            fit_costs([count_sparse_operations(work) for work, _, _ in part], [sparse for _, _, sparse in part]),
        )
        print(f"{name} with {options.threads} threads: Costs({fitted.dense}, {fitted.sparse})")
        for label, costs in (("present", present), ("fitted", fitted)):
            print(f"  {label}: {describe_regret(part, costs)}")


if __name__ == "__main__":
    main()
