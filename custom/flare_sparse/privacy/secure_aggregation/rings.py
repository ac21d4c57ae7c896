"""Values as fixed-point integers of a ring, in which sums are exact and associative.

A value x of weight p becomes the integer nearest to p * x * scale, modulo 2^bits. The weights of a sum add up to 1, so
a sum of values up to ``bound`` stays below 2^(bits - 2) plus half an integer per site: it cannot wrap around.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...core.errors import RejectedMessage

MAX_SITES = 1024
"""Most sites of a sum: with more, the rounding errors of 32 bits could exceed 2^-20 of the bound."""
MAX_BOUND = 2.0**20
"""Largest bound of a ring of 32 bits, whose integers are then 2^-10 apart."""


@dataclass(frozen=True)
class Ring:
    """Integers modulo ``2^bits`` that stand for numbers up to ``bound``.

    Attributes:
        bits: 32 or 64.
        bound: largest absolute value that can be encoded.
    """

    bits: int
    bound: float

    @cached_property
    def scale(self) -> float:
        """Integers per unit: the largest power of 2 for which ``bound * scale`` is at most ``2^(bits - 2)``."""
        # A power of 2 makes the products with it exact, so that the rounding to an integer is the only error.
        # frexp is exact, and a logarithm would be rounded: bound = mantissa * 2^exponent, 0.5 <= mantissa < 1.
        mantissa, exponent = math.frexp(self.bound)
        is_power_of_2 = mantissa == 0.5
        return 2.0 ** (self.bits - 2 - (exponent - is_power_of_2))

    def compute_error(self, sites: int) -> float:
        """Return the largest error of a sum of ``sites`` sites: each rounds by at most half an integer."""
        return sites / 2 / self.scale

    def encode(self, values: np.ndarray, weight: float) -> np.ndarray:
        """Return ``weight * values`` as integers of the ring.

        Args:
            values: float64 ``(n,)``.
            weight: weight of the site in the sum, 0 to 1.

        Returns:
            uint32 or uint64 ``(n,)``.

        Raises:
            RejectedMessage: a value is not finite or above the bound. Nothing may be sent.
        """
        if not np.isfinite(values).all():
            raise RejectedMessage("E_FINITE", "values", "finite numbers", "NaN or infinite")
        if values.size and (largest := float(np.abs(values).max())) > self.bound:
            raise RejectedMessage("E_RANGE", "values", f"at most {self.bound:g}", f"{largest:g}")
        integers = np.rint(values * weight * self.scale).astype(np.int64)
        # The conversion to an unsigned type wraps negative numbers around, which is what the ring means by them.
        return integers.astype(f"<u{self.bits // 8}")

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Return the numbers, float64 ``(n,)``, of a sum; the upper half of the ring stands for negative numbers."""
        return total.view(f"<i{self.bits // 8}").astype(np.float64) / self.scale


@dataclass(frozen=True, eq=False)
class RingFormat:
    """Values section of a padded message: first the wide integers of 64 bits, then the narrow ones of 32 bits.

    Attributes:
        is_wide: bool ``(n,)``, values that need the wide ring: scores and buffers, whose range no setting bounds.
        narrow: ring of the other values.
    """

    is_wide: np.ndarray
    narrow: Ring

    WIDE = Ring(64, MAX_BOUND)

    @cached_property
    def wide_bytes(self) -> int:
        """Length of the wide integers in a section."""
        return 8 * int(np.count_nonzero(self.is_wide))

    @property
    def section_bytes(self) -> int:
        """Length of a section."""
        return 4 * self.is_wide.size + self.wide_bytes // 2

    def encode(self, values: np.ndarray, weight: float) -> np.ndarray:
        """Return the section, uint8 ``(section_bytes,)``, of float64 ``(n,)`` values times ``weight``.

        Raises:
            RejectedMessage: as :meth:`Ring.encode`.
        """
        wide = self.WIDE.encode(values[self.is_wide], weight)
        narrow = self.narrow.encode(values[~self.is_wide], weight)
        return np.concatenate([wide.view(np.uint8), narrow.view(np.uint8)])

    def decode(self, section: np.ndarray) -> np.ndarray:
        """Return the numbers, float64 ``(n,)``, of the section of a sum."""
        values = np.empty(self.is_wide.size)
        wide, narrow = self._split(section)
        values[self.is_wide], values[~self.is_wide] = self.WIDE.decode(wide), self.narrow.decode(narrow)
        return values

    def add(self, total: np.ndarray, section: np.ndarray, sign: int = 1) -> None:
        """Add a section to ``total``, or subtract it with ``sign`` -1, in place; every order gives the same bits.

        Args:
            total: uint8 ``(section_bytes,)``.
            section: uint8 ``(section_bytes,)``.
            sign: 1 or -1.
        """
        for part, term in zip(self._split(total), self._split(section), strict=True):
            (np.add if sign > 0 else np.subtract)(part, term, out=part)

    def _split(self, section: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the wide and of the narrow integers."""
        return section[: self.wide_bytes].view("<u8"), section[self.wide_bytes :].view("<u4")
