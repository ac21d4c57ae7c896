"""Split of a site's examples into training and test: a function of seed and identifiers, not of the order on disk."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256


def split_train_test(ids: Iterable[str], seed: int, test_share: float = 0.2) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split identifiers into training and test.

    Identifiers are sorted by ``sha256("<seed>:<id>")``; the first ``round(test_share * n)`` are for testing, at least
    one if there are two or more. The default is the 80 to 20 split within each site of NeuroSFL, section 4.2.

    Returns:
        Training and test identifiers, each in the order of their hashes.
    """
    ordered = sorted(ids, key=lambda name: sha256(f"{seed}:{name}".encode()).digest())
    num_tests = max(round(test_share * len(ordered)), 1 if len(ordered) > 1 else 0)
    return tuple(ordered[num_tests:]), tuple(ordered[:num_tests])
