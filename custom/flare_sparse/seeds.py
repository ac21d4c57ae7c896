"""Seeds derived from (run seed, labels): the same inputs give the same bits, in any process and any order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *labels: object) -> int:
    """A 63-bit seed for the stream that the labels name, e.g. ``derive(1, "train", "site-2", 7)``."""
    text = "\x1f".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def make_generator(seed: int, *labels: object) -> torch.Generator:
    """A generator of its own for one stream."""
    return torch.Generator().manual_seed(derive_seed(seed, *labels))


@contextmanager
def seed_torch(seed: int) -> Iterator[None]:
    """Torch's global generator (dropout, initialisation) starts at ``seed`` inside, and goes on as before after."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """A fixed number of torch threads: another number ends in other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
