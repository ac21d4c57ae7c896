"""Shares of a secret: any threshold of them recovers it, fewer are as good as none."""

from __future__ import annotations

import random
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.privacy.secure_aggregation.keys import PRIME, recover_secret, split_secret


@given(secret=st.binary(min_size=32, max_size=32), count=st.integers(1, 12), data=st.data())
def test_any_threshold_of_shares_recovers_the_secret(secret: bytes, count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, count))
    shares = split_secret(secret, count, threshold, random.Random(count).randrange)
    size = data.draw(st.integers(threshold, count))
    chosen = data.draw(st.permutations(range(count)))[:size]
    assert recover_secret({number: shares[number] for number in chosen}) == secret


def test_fewer_shares_fit_every_secret() -> None:
    """For t - 1 shares there is a polynomial through each possible secret, so they say nothing about it."""
    shares = split_secret(secrets.token_bytes(32), 3, 2)
    other = secrets.token_bytes(32)
    x, y = 1, int.from_bytes(shares[0], "little")
    slope = (y - int.from_bytes(other, "little")) * pow(x, -1, PRIME) % PRIME
    forged = ((int.from_bytes(other, "little") + slope * 2) % PRIME).to_bytes(33, "little")
    assert recover_secret({0: shares[0], 1: forged}) == other


def test_shares_of_a_known_polynomial() -> None:
    """5 + 7 x + 2 x^2 at 1, 2 and 3."""
    coefficients = iter([7, 2])
    shares = split_secret((5).to_bytes(32, "little"), 3, 3, lambda _: next(coefficients))
    assert [int.from_bytes(share, "little") for share in shares] == [14, 27, 44]


def test_one_share_too_few_does_not_recover_the_secret() -> None:
    secret = secrets.token_bytes(32)
    shares = split_secret(secret, 5, 4)
    assert recover_secret(dict(enumerate(shares[:3]))) != secret


@pytest.mark.parametrize(("count", "threshold"), [(3, 0), (3, 4)])
def test_impossible_threshold_is_refused(count: int, threshold: int) -> None:
    with pytest.raises(ValueError, match="threshold"):
        split_secret(bytes(32), count, threshold)


def test_modulus_is_the_smallest_prime_above_2_to_the_256() -> None:
    def is_probably_prime(n: int) -> bool:
        return all(pow(base, n - 1, n) == 1 for base in (2, 3, 5, 7, 11, 13))

    assert next(n for n in range(2**256 + 1, 2**256 + 400, 2) if is_probably_prime(n)) == PRIME
