"""Shares of a secret, of which ``threshold`` recover it and fewer say nothing about it.

Shamir, "How to Share a Secret", CACM 1979: the shares are values of a random polynomial over a prime field. No
maintained library that this package depends on has it; it needs integer arithmetic only.
"""

import secrets
from collections.abc import Callable, Mapping

PRIME = 2**256 + 297
"""The smallest prime above 2^256: every secret of 32 bytes is an element of the field."""
SECRET_BYTES, SHARE_BYTES = 32, 33


def split_secret(
    secret: bytes, count: int, threshold: int, draw: Callable[[int], int] = secrets.randbelow
) -> list[bytes]:
    """Return ``count`` shares of ``SHARE_BYTES`` bytes; the share of number i is the polynomial at i + 1.

    Args:
        secret: 32 bytes.
        count: number of shares.
        threshold: shares that recover the secret, 1 to ``count``.
        draw: returns a random integer below its argument.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"need {SECRET_BYTES} bytes and a threshold of 1 to {count}, found {len(secret)}, {threshold}")
    coefficients = [int.from_bytes(secret, "little"), *(draw(PRIME) for _ in range(threshold - 1))]
    return [_evaluate(coefficients, x).to_bytes(SHARE_BYTES, "little") for x in range(1, count + 1)]


def recover_secret(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret of at least ``threshold`` shares by number; None if they are not those of one secret.

    Wrong shares usually give a wrong secret and not None: the caller compares it with what it knows of the secret.
    """
    points = [(number + 1, int.from_bytes(share, "little")) for number, share in sorted(shares.items())]
    total = 0
    # Lagrange interpolation at 0.
    for x, y in points:
        numerator = denominator = 1
        for other, _ in points:
            if other != x:
                numerator, denominator = numerator * other % PRIME, denominator * (other - x) % PRIME
        total = (total + y * numerator * pow(denominator, -1, PRIME)) % PRIME
    return total.to_bytes(SECRET_BYTES, "little") if total < 2 ** (8 * SECRET_BYTES) else None


def _evaluate(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
