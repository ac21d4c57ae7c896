"""The two ends of an encrypted aggregation: sites encrypt and decrypt, the server sums ciphertexts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError, RejectedMessage
from ...core.exchange import SealedValues
from ...wire.ciphertexts import get_key_id, join_ciphertexts, split_ciphertexts
from .ckks import Scheme

PRECISION = 2.0**-22
"""Largest error of a value that was encrypted, summed and decrypted, before it is rounded to float32."""

_CALIBRATION = 1024.0


class ServerCipher:
    """Sums ciphertexts without a key.

    Args:
        context: content of ``server_context.tenseal``.

    Attributes:
        ciphertext_format: sizes and parameters of ciphertexts, as the wire needs them.
        min_weight: smallest weight in a sum.

    Raises:
        ConfigError: the context is unusable, or contains the secret key.
    """

    def __init__(self, context: bytes):
        self._scheme = Scheme(context)
        if self._scheme.context.has_secret_key():
            raise ConfigError(
                "the server's TenSEAL context contains the secret key, so the server could decrypt every update: give "
                "it server_context.tenseal"
            )
        self.ciphertext_format = self._scheme.ciphertext_format
        # CKKS encodes a weight as an integer multiple of 1 / scale. A smaller weight becomes 0, and SEAL refuses the
        # product with 0, because it would be a ciphertext that anyone can read.
        self.min_weight = 1 / self._scheme.scale

    def check(self, encrypted: SealedValues, count: int, site: str) -> None:
        """Check that an update contains ``count`` values, freshly encrypted with these parameters.

        Raises:
            RejectedMessage: the update violates this.
        """
        try:
            for vector in _parse_vectors(self._scheme, encrypted, count):
                # A sum of ciphertexts of different levels would be decoded at the wrong scale.
                if (level := self._scheme.get_level(vector)) != self._scheme.fresh_level:
                    raise RejectedMessage("E_CIPHERTEXT", "level", self._scheme.fresh_level, level)
        except RejectedMessage as error:
            raise error.attach_site(site) from error

    def weighted_sum(self, updates: Sequence[SealedValues], weights: Sequence[float], count: int) -> SealedValues:
        """Return ``sum_k weights[k] * updates[k]``, still encrypted.

        The sum is about half as long as an update, because the multiplication consumes one of the two primes.

        Args:
            updates: encrypted values that passed :meth:`check`.
            weights: one weight per update, each at least ``min_weight``.
            count: number of values in each update.
        """
        total: list[Any] = []
        # One update at a time: only the total and one parsed update are in memory.
        for update, weight in zip(updates, weights, strict=True):
            scaled = [vector * float(weight) for vector in _parse_vectors(self._scheme, update, count)]
            total = [partial + term for partial, term in zip(total, scaled, strict=True)] if total else scaled
        return join_ciphertexts(
            self.ciphertext_format.parameters,
            get_key_id(updates[0]),
            [self._scheme.serialize_vector(vector) for vector in total],
        )


class SiteCipher:
    """Encrypts a site's values and decrypts a sum.

    Args:
        context: content of ``client_context.tenseal``.

    Attributes:
        key_id: 16 bytes that identify the secret key.
        ciphertext_format: sizes and parameters of ciphertexts, as the wire needs them.
        max_value: largest absolute value that can be encrypted.

    Raises:
        ConfigError: the context is unusable, or has no secret key.
    """

    def __init__(self, context: bytes):
        self._scheme = Scheme(context)
        self.key_id = self._scheme.compute_key_id()
        self.ciphertext_format, self.max_value = self._scheme.ciphertext_format, self._scheme.max_value
        self._rescaling_factor = self._measure_rescaling_factor()

    def _measure_rescaling_factor(self) -> float:
        """Return the factor by which a multiplication by 1 changes a value."""
        # After a multiplication CKKS divides by a prime that is only close to the scale. TenSEAL ignores the ratio, so
        # every aggregation would multiply all values by 1 + 7e-7.
        ts, scheme = self._scheme.ts, self._scheme
        product = ts.ckks_vector(scheme.context, [_CALIBRATION] * self.ciphertext_format.slots) * 1.0
        return float(np.mean(product.decrypt())) / _CALIBRATION

    def encrypt(self, values: Tensor) -> SealedValues:
        """Encrypt values ``(n,)``.

        Raises:
            RejectedMessage: a value is not finite, or so large that the sum could wrap around. Nothing may be sent.
        """
        # Values must be checked here: the server cannot inspect a ciphertext.
        numbers = values.detach().double().numpy()
        if not np.isfinite(numbers).all():
            raise RejectedMessage("E_FINITE", "values", "finite numbers", "NaN or infinite")
        if numbers.size and (largest := float(np.abs(numbers).max())) > self.max_value:
            raise RejectedMessage("E_RANGE", "values", f"at most {self.max_value:g}", f"{largest:g}")
        slots, scheme = self.ciphertext_format.slots, self._scheme
        chunks = [numbers[start : start + slots] for start in range(0, numbers.size, slots)]
        ciphertexts = [scheme.serialize_vector(scheme.ts.ckks_vector(scheme.context, chunk)) for chunk in chunks]
        return join_ciphertexts(self.ciphertext_format.parameters, self.key_id, ciphertexts)

    def decrypt(self, encrypted: SealedValues, count: int) -> Tensor:
        """Return the ``count`` values of an update or of a sum of updates, as float32.

        Raises:
            RejectedMessage: the ciphertext is encrypted with another key, malformed, or decrypts to noise.
        """
        if (key_id := get_key_id(encrypted)) != self.key_id:
            raise RejectedMessage("E_KEY", "key", self.key_id.hex(), key_id.hex())
        parts = [self._decrypt_vector(vector) for vector in _parse_vectors(self._scheme, encrypted, count)]
        values = torch.from_numpy(np.concatenate([np.zeros(0), *parts]))
        # CKKS does not authenticate: a ciphertext of another key decrypts to random numbers near the modulus, far
        # beyond the largest value. The 1 is slack for the error of the encryption.
        if not bool(torch.isfinite(values).all()) or (count and float(values.abs().max()) > self.max_value + 1):
            raise RejectedMessage("E_CIPHERTEXT", "values", f"numbers up to {self.max_value:g}", "noise")
        return values.float()

    def _decrypt_vector(self, vector: Any) -> np.ndarray:
        is_sum = self._scheme.get_level(vector) == self._scheme.summed_level
        return np.asarray(vector.decrypt()) / (self._rescaling_factor if is_sum else 1.0)


def _parse_vectors(scheme: Scheme, encrypted: SealedValues, count: int) -> list[Any]:
    """Return the CKKS vectors of ``count`` values whose lengths the wire has checked."""
    slots = scheme.ciphertext_format.slots
    sizes = [min(slots, count - start) for start in range(0, count, slots)]
    ciphertexts = split_ciphertexts(encrypted, scheme.ciphertext_format, count)
    return [scheme.parse_ciphertext(data, size) for data, size in zip(ciphertexts, sizes, strict=True)]
