"""The two ends of an encrypted sum: a site seals and opens, the server adds up what it cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, RejectedMessage
from ..exchange import EncryptedValues
from ..wire.ciphertexts import get_key_id, join_ciphertexts, split_ciphertexts
from .ckks import Scheme

PRECISION = 2.0**-22
"""Largest difference of a value that was encrypted, summed and decrypted, before it is rounded to float32."""

_CALIBRATION = 1024.0


class ServerCipher:
    """Adds up what it cannot read.

    Args:
        context: ``server_context.tenseal``.

    Attributes:
        least_weight: of a sum; below it a weight is written as 0, and a product with 0 is no ciphertext.

    Raises:
        ConfigError: the context is unusable, or holds the secret key.
    """

    def __init__(self, context: bytes):
        self._scheme = Scheme(context)
        if self._scheme.context.has_secret_key():
            raise ConfigError(
                "the server's TenSEAL context holds the secret key, so the server could read every answer: give it "
                "server_context.tenseal"
            )
        self.ciphertext_format = self._scheme.ciphertext_format
        self.least_weight = 1 / self._scheme.scale

    def check(self, sealed: EncryptedValues, count: int, site: str) -> None:
        """Raises:
        RejectedMessage: not ``count`` values, freshly encrypted with these parameters.
        """
        try:
            for vector in _vectors(self._scheme, sealed, count):
                if (level := self._scheme.level(vector)) != self._scheme.fresh:
                    raise RejectedMessage("E_CIPHERTEXT", "level", self._scheme.fresh, level)
        except RejectedMessage as error:
            raise error.with_site(site) from error

    def weighted_sum(self, answers: Sequence[EncryptedValues], weights: Sequence[float], count: int) -> EncryptedValues:
        """``sum_k weights[k] * answers[k]``, still encrypted; answers that :meth:`check` has passed, weights of at least
        ``least_weight``.

        It is about half as long as an answer: the multiplication uses up one of its two primes.
        """
        total: list[Any] = []
        for answer, weight in zip(answers, weights, strict=True):
            scaled = [vector * float(weight) for vector in _vectors(self._scheme, answer, count)]
            total = [have + more for have, more in zip(total, scaled, strict=True)] if total else scaled
        return join_ciphertexts(
            self.ciphertext_format.parameters,
            get_key_id(answers[0]),
            [self._scheme.written(vector) for vector in total],
        )


class SiteCipher:
    """Encrypts a site's values, decrypts a sum.

    Args:
        context: ``client_context.tenseal``.

    Raises:
        ConfigError: the context is unusable, or has no secret key.
    """

    def __init__(self, context: bytes):
        self._scheme = Scheme(context)
        self.key = self._scheme.key()
        self.ciphertext_format, self.limit = self._scheme.ciphertext_format, self._scheme.limit
        self._factor = self._measured()

    def _measured(self) -> float:
        """What a multiplication by 1 makes of 1. CKKS divides by a prime that is only nearly the scale; TenSEAL leaves
        that out of the account, and 7e-7 of each value would be lost or won in every round.
        """
        ts, scheme = self._scheme.ts, self._scheme
        ones = ts.ckks_vector(scheme.context, [_CALIBRATION] * self.ciphertext_format.slots) * 1.0
        return float(np.mean(ones.decrypt())) / _CALIBRATION

    def encrypt(self, values: Tensor) -> EncryptedValues:
        """Encrypt values ``(n,)``; afterwards nobody without the key can look at one.

        Raises:
            RejectedMessage: a value is not finite, or so large that the sum could wrap around. Nothing is sent.
        """
        numbers = values.detach().double().numpy()
        if not np.isfinite(numbers).all():
            raise RejectedMessage("E_FINITE", "values", "finite numbers", "NaN or infinite")
        if numbers.size and (largest := float(np.abs(numbers).max())) > self.limit:
            raise RejectedMessage("E_RANGE", "values", f"at most {self.limit:g}", f"{largest:g}")
        step, scheme = self.ciphertext_format.slots, self._scheme
        pieces = [numbers[start : start + step] for start in range(0, numbers.size, step)]
        written = [scheme.written(scheme.ts.ckks_vector(scheme.context, piece)) for piece in pieces]
        return join_ciphertexts(self.ciphertext_format.parameters, self.key, written)

    def decrypt(self, sealed: EncryptedValues, count: int) -> Tensor:
        """The ``count`` values, float32, of an answer or of a sum of answers.

        Raises:
            RejectedMessage: of another key, malformed, or not what anyone with this key encrypted.
        """
        if (found := get_key_id(sealed)) != self.key:
            raise RejectedMessage("E_KEY", "key", self.key.hex(), found.hex())
        parts = [self._decrypted(vector) for vector in _vectors(self._scheme, sealed, count)]
        values = torch.from_numpy(np.concatenate([np.zeros(0), *parts]))
        if not bool(torch.isfinite(values).all()) or (count and float(values.abs().max()) > self.limit + 1):
            raise RejectedMessage("E_CIPHERTEXT", "values", f"numbers up to {self.limit:g}", "noise")
        return values.float()

    def _decrypted(self, vector: Any) -> np.ndarray:
        factor = self._factor if self._scheme.level(vector) == self._scheme.summed else 1.0
        return np.asarray(vector.decrypt()) / factor


def _vectors(scheme: Scheme, sealed: EncryptedValues, count: int) -> list[Any]:
    """The CKKS vectors of ``count`` values that the wire has measured."""
    slots = scheme.ciphertext_format.slots
    left = [min(slots, count - start) for start in range(0, count, slots)]
    return [
        scheme.read(data, n)
        for data, n in zip(split_ciphertexts(sealed, scheme.ciphertext_format, count), left, strict=True)
    ]
