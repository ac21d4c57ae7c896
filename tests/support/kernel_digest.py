"""Digest of what the sparse kernels compute, also as a program: in a process whose kernels are not compiled yet."""

from __future__ import annotations

import hashlib
import logging

import torch
from torch import nn

from flare_sparse.compute.kernels.network import use_sparse_kernels
from flare_sparse.compute.kernels.preparation import prepare_loops
from flare_sparse.compute.kernels.threads import limit_kernel_threads


def digest_kernels(threads: int) -> str:
    """Return the SHA-256 of output and gradients of a network that calls all loops, in 1 or 2 threads."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.MaxPool3d(2), nn.ReLU()),
        *(nn.Conv3d(8, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 4, 3), nn.LeakyReLU()),
    )
    parameters = dict(network.named_parameters())
    live = {name: torch.rand(value.shape) < 0.3 for name, value in parameters.items() if value.ndim > 1}
    with torch.no_grad():
        for name, mask in live.items():
            parameters[name] *= mask
    volumes = torch.randn(4, 1, 26, 32, 26, requires_grad=True)
    with torch.enable_grad(), use_sparse_kernels(network, live, lambda work: True), limit_kernel_threads(threads):
        output = network(volumes)
        (output**2).sum().backward()
    results = [output.detach(), *(leaf.grad for leaf in (volumes, *parameters.values()) if leaf.grad is not None)]
    return hashlib.sha256(b"".join(result.numpy().tobytes() for result in results)).hexdigest()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    prepare_loops()
    print(digest_kernels(1), digest_kernels(2))
