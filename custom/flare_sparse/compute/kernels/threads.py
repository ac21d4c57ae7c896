"""Division of a layer's samples and channels among threads.

Where torch has several threads, they are those of torch's OpenMP runtime: after an operation of torch these spin for
some milliseconds, and other threads would compete with them for the cores. Where torch has one thread, they are those
of a pool.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .geometry import Integers, Part

_num_threads: int | None = None
_is_forked = False

_PARTS_OF_A_THREAD = 4
"""Parts for each thread, which takes one at a time: the channels differ in work, and the threads in speed."""

_LEAST_WORK = 4_000_000
"""Multiplications of one thread, about 0.1 ms, below which waking another one takes longer than it saves."""


def set_kernel_threads(count: int | None) -> None:
    """Set the number of threads of the kernels in this process; None: as many as torch has."""
    global _num_threads  # noqa: PLW0603 - as torch's own number, which is global too
    _num_threads = count


@contextmanager
def limit_kernel_threads(count: int | None) -> Iterator[None]:
    """Set the number of threads of the kernels within the context; restore it on exit."""
    previous = _num_threads
    set_kernel_threads(count)
    try:
        yield
    finally:
        set_kernel_threads(previous)


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
    team = _num_threads or torch.get_num_threads()
    threads = max(1, min(team, int(work[-1]) * samples // _LEAST_WORK))
    # Each thread takes the next part when it has finished one: advancing a list's iterator is atomic.
    remaining = iter(list(divide(work, samples, threads, divides_samples=divides_samples)))
    if threads == 1:
        compute_parts(remaining, function)
    else:
        # All threads, also where there is work for some of them: GNU's runtime ends those that a smaller team leaves
        # out, and to create them again takes a millisecond.
        call_in_threads(team, lambda: compute_parts(remaining, function))


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


def call_in_threads(threads: int, function: Callable[[], None]) -> None:
    """Call a function in the calling thread and, at the same time, in up to ``threads - 1`` others.

    Returns when all have returned, also after an error: the arrays that they write must not be freed before. One of the
    errors is raised.
    """
    # A forked process has none of OpenMP's threads, and its runtime would wait for them forever.
    start = None if _is_forked or torch.get_num_threads() == 1 else _find_parallel_region()
    if start is None:
        _call_in_pool(threads, function)
        return
    entered: list[int] = []
    errors: list[BaseException] = []

    def call(_: object) -> None:
        # An error cannot pass through the runtime, which is written in C.
        try:
            entered.append(threading.get_ident())
            function()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    start(_REGION(call), None, threads, 0)
    if threading.get_ident() not in entered:
        # A signal handler has raised before the first line of ``call``, where ctypes drops the error.
        raise KeyboardInterrupt
    if errors:
        raise next((error for error in errors if not isinstance(error, Exception)), errors[0])


_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _find_parallel_region() -> Callable[..., None] | None:
    """Return the function of torch's OpenMP runtime that calls a function in several threads.

    ``GOMP_parallel(function, argument, threads, flags)`` is part of the binary interface of GNU's runtime, which
    Intel's and LLVM's have, too. None if torch's runtime does not have it.
    """
    # Keep the linker's order: a preloaded runtime comes first. The libraries that these need are searched, too.
    for library in (None, torch._C.__file__):
        try:
            region: Any = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError):
            continue
        region.argtypes, region.restype = (_REGION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return region  # type: ignore[no-any-return]
    return None


def _call_in_pool(threads: int, function: Callable[[], None]) -> None:
    """Call a function in this thread and in those of a pool; calls that have not begun when it returns are dropped."""
    others = [_build_pool(threads).submit(function) for _ in range(threads - 1)]
    try:
        function()
    finally:
        for other in others:
            if not other.cancel():
                other.result()


@cache
def _build_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="sparse-kernels")


def _leave_threads_behind() -> None:
    global _is_forked  # noqa: PLW0603 - threads belong to the process
    _is_forked = True
    _build_pool.cache_clear()


os.register_at_fork(after_in_child=_leave_threads_behind)
