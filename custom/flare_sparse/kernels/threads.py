"""Division of a layer's samples and channels among threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from .arguments import Integers, Part

_count: int | None = None

_PARTS_OF_A_THREAD = 4
"""Parts for each thread, which takes one at a time: the channels differ in work, and the threads in speed."""

_LEAST_WORK = 4_000_000
"""Multiplications of one thread, about 0.1 ms, below which waking another one takes longer than it saves."""


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


def run_parts(work: Integers, samples: int, function: Callable[[Part], None], *, divides_samples: bool = True) -> None:
    """Call a function for parts that cover all channels of all samples, in the kernels' threads.

    The function releases the GIL, and every channel of a sample is computed by one call. The calling thread computes,
    too.

    Args:
        work: ``(channels + 1,)`` multiplications of a sample before each channel, ascending from 0.
        samples: number of samples.
        function: computes a part.
        divides_samples: whether a part may hold some of the samples only.
    """
    threads = max(1, min(_count or torch.get_num_threads(), int(work[-1]) * samples // _LEAST_WORK))
    parts = list(divide(work, samples, threads, divides_samples=divides_samples))
    # Each thread takes the next part when it has finished one: advancing a list's iterator is atomic.
    remaining = iter(parts)
    others = [_build_pool(threads).submit(compute_parts, remaining, function) for _ in range(threads - 1)]
    try:
        compute_parts(remaining, function)
    finally:
        # Also after an error: the arrays that the other threads write must not be freed before they are done.
        for other in others:
            if not other.cancel():
                other.result()


def divide(work: Integers, samples: int, threads: int, *, divides_samples: bool) -> Iterator[Part]:
    """Yield parts of like work; arguments as of :func:`run_parts`."""
    channels, count = len(work) - 1, _PARTS_OF_A_THREAD * threads
    if threads == 1:
        yield Part(0, samples, 0, channels)
    elif divides_samples and samples % threads == 0:
        bounds = [samples * part // count for part in range(count + 1)]
        yield from (Part(first, last, 0, channels) for first, last in pairwise(bounds) if first < last)
    else:
        inner = np.searchsorted(work, np.arange(1, count) * (work[-1] / count))
        bounds = [0, *map(int, inner), channels]
        yield from (Part(0, samples, first, last) for first, last in pairwise(bounds) if first < last)


def compute_parts(parts: Iterator[Part], function: Callable[[Part], None]) -> None:
    """Call a function for parts until none is left."""
    for part in parts:
        function(part)
