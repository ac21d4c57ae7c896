"""Seeds derived from the run's seed and labels.

A stream depends on its labels alone, not on how many numbers other streams have drawn: the same inputs give the same
bits in any process and in any order of calls.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
PROCESS = threading.RLock()
"""Held while a thread sets what belongs to the whole process: torch's generators and number of threads, imports.

Runs in several threads of one process wait for each other, so that each has the bits that it has alone.
"""


def derive_seed(seed: int, *labels: object) -> int:
    """Return a 63-bit seed for the stream named by the labels, e.g. ``derive_seed(1, "train", "site-2", 7)``."""
    # The separator keeps ("a", "bc") and ("ab", "c") apart.
    text = "\x1f".join(str(part) for part in (seed, *labels))
    # 63 bits: torch takes seeds as signed 64-bit integers.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def make_generator(seed: int, *labels: object) -> torch.Generator:
    """Return a new generator for the stream named by the labels."""
    return torch.Generator().manual_seed(derive_seed(seed, *labels))


@contextmanager
def seed_torch(seed: int) -> Iterator[None]:
    """Seed torch's global generators (dropout, initialisation) within the context; restore their state on exit."""
    with PROCESS, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        if torch.cuda.is_available():
            torch.manual_seed(seed)
        else:
            # Without a GPU, torch.manual_seed writes down the call stack, which takes longer than a small step.
            torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within the context; restore it on exit.

    The number of threads changes the order of floating-point sums, and with it the bits of the result.
    """
    with _set_for_process(torch.get_num_threads, torch.set_num_threads, count):
        yield


@contextmanager
def require_deterministic(required: bool) -> Iterator[None]:
    """Let torch use operations only whose bits are the same in every run on one device; restore its rule on exit.

    Args:
        required: False: change nothing.
    """
    if not required:
        yield
        return
    # cuBLAS reads it when it starts; other workspaces add in an order of their own.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with _set_for_process(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True):
        yield


@contextmanager
def _set_for_process(read: Callable[[], T], write: Callable[[T], None], value: T) -> Iterator[None]:
    """Set what a whole process shares within the context, while other threads wait; restore it on exit."""
    with PROCESS:
        previous = read()
        write(value)
        try:
            yield
        finally:
            write(previous)
