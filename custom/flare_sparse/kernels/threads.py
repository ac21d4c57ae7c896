"""Division of a layer's channels among threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import torch

_count: int | None = None

PARTS = 8
"""Parts into which the channels of a sample are divided; each thread takes one part at a time."""


def set_kernel_threads(count: int | None) -> None:
    """Set the number of threads of the kernels in this process; None: as many as torch has."""
    global _count  # noqa: PLW0603 - as torch's own number, which is global too
    _count = count


@contextmanager
def limit_kernel_threads(count: int | None) -> Iterator[None]:
    """Set the number of threads of the kernels within the context; restore it on exit."""
    previous = _count
    set_kernel_threads(count)
    try:
        yield
    finally:
        set_kernel_threads(previous)


@cache
def _build_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sparse-kernels")


# The threads of a pool do not exist in a forked process.
os.register_at_fork(after_in_child=_build_pool.cache_clear)


def run_parts(channels: int, samples: int, function: Callable[[int, int, int], None]) -> None:
    """Call ``function(sample, first, last)`` for all parts ``first <= channel < last``, in the kernels' threads.

    The functions called release the GIL, and every channel is computed by one call.
    """
    threads = _count or torch.get_num_threads()
    if threads == 1:
        for sample in range(samples):
            function(sample, 0, channels)
        return
    bounds = sorted({channels * part // PARTS for part in range(PARTS + 1)})
    parts = [(sample, first, last) for sample in range(samples) for first, last in pairwise(bounds)]
    for _ in _build_pool(threads).map(lambda part: function(*part), parts):
        pass
