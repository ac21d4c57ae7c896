"""Compilation of the kernels' loops ahead of their use, once on a machine."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import filelock
import torch
from torch import nn

from ...core.seeds import seed_torch
from . import loops
from .cost import Work, is_sparse_faster
from .network import use_sparse_kernels

_LOG = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Seconds that a process waits for another one to compile the loops."""


def decide_and_prepare(work: Work) -> bool:
    """Return whether the kernels compute a block; the first block that they compute has all loops compiled."""
    is_sparse = is_sparse_faster(work)
    if is_sparse:
        prepare_loops()
    return is_sparse


@cache
def prepare_loops() -> None:
    """Compile all loops, or read them from the folder where numba keeps them, and log how long it took.

    The first time on a machine this takes 10 to 30 seconds, later half a second.
    """
    _LOG.info("sparse kernels: loading; the first time on a machine they are compiled, which takes up to 30 s")
    # The seed keeps the initial weights of this network out of the streams of a run.
    with seed_torch(0):
        network = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2), nn.MaxPool3d(2), nn.ReLU())
    live = {"0.weight": torch.ones(2, 1, 3, 3, 3, dtype=torch.bool)}
    with _lock_cache():
        began = time.monotonic()
        with torch.enable_grad(), use_sparse_kernels(network, live, lambda work: True):
            network(torch.ones(1, 1, 4, 4, 4, requires_grad=True)).sum().backward()
        seconds = time.monotonic() - began
    is_compiled = bool(loops.convolve.stats.cache_misses)
    _LOG.info("sparse kernels: %s in %.1f s", "compiled" if is_compiled else "read from numba's cache", seconds)


@contextmanager
def _lock_cache() -> Iterator[None]:
    """Let the processes of a machine take turns: one compiles the loops, the others read them from numba's cache."""
    with ExitStack() as stack:
        folder = loops.convolve.stats.cache_path
        # Without a cache there is nothing to wait for, and a file system without locks only costs time.
        if folder:
            with suppress(OSError, NotImplementedError, filelock.Timeout):
                Path(folder).mkdir(parents=True, exist_ok=True)
                stack.enter_context(filelock.FileLock(Path(folder) / "loops.lock", timeout=PATIENCE_S))
        yield
