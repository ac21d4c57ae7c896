"""Compilation of the kernels' loops ahead of their use, once in a process."""

from __future__ import annotations

import logging
import time
from functools import cache

import torch
from torch import nn

from ...core.seeds import seed_torch
from .network import use_sparse_kernels

LOG = logging.getLogger(__name__)

SLOW = 2.0
"""Seconds after which the loops were compiled rather than read from numba's cache."""


@cache
def prepare_loops() -> None:
    """Compile all loops, or read them from the folder where numba keeps them, and log how long it took.

    The first time on a machine this takes 10 to 30 seconds, later half a second.
    """
    LOG.info("sparse kernels: loading; the first time on a machine they are compiled, which takes up to 30 s")
    began = time.monotonic()
    # The seed keeps the initial weights of this network out of the streams of a run.
    with seed_torch(0):
        network = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2), nn.MaxPool3d(2), nn.ReLU())
    live = {"0.weight": torch.ones(2, 1, 3, 3, 3, dtype=torch.bool)}
    with torch.enable_grad(), use_sparse_kernels(network, live, lambda work: True):
        network(torch.ones(1, 1, 4, 4, 4, requires_grad=True)).sum().backward()
    seconds = time.monotonic() - began
    LOG.info("sparse kernels: %s in %.1f s", "compiled" if seconds > SLOW else "read from numba's cache", seconds)
