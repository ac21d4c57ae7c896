"""Train and test examples of a site: a function of the seed and the identifiers, not of any order on disk."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256


def train_test(ids: Iterable[str], seed: int, test_share: float = 0.2) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Training and test identifiers, each in an order that depends on the seed only.

    Identifiers are sorted by ``sha256("<seed>:<id>")``; the first ``round(test_share * n)`` are for testing, at least
    one when there are two. NeuroSFL section 4.2 splits 80 to 20 within each site.
    """
    ordered = sorted(ids, key=lambda name: sha256(f"{seed}:{name}".encode()).digest())
    tests = max(round(test_share * len(ordered)), 1 if len(ordered) > 1 else 0)
    return tuple(ordered[tests:]), tuple(ordered[:tests])
