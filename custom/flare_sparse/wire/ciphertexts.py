"""Encrypted values on the wire: how a message holds ciphertexts, measured before one is parsed.

parameters (8 bytes) | key (16 bytes) | length of each ciphertext (uint32) | ciphertexts
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from ..errors import RejectedMessage
from ..exchange import EncryptedValues
from .plan import CiphertextFormat

CODE = 4
"""Of the number format, beside those of ``values.CODES``."""

_PARAMETERS, _KEY = slice(0, 8), slice(8, 24)
_LENGTHS = 24
_WIDTH = 4


def join_ciphertexts(parameters: bytes, key: bytes, ciphertexts: Sequence[bytes]) -> EncryptedValues:
    """Ciphertexts as they travel; ``parameters`` 8 bytes, ``key`` 16."""
    lengths = np.array([len(one) for one in ciphertexts], "<u4").tobytes()
    return EncryptedValues(
        torch.frombuffer(bytearray(b"".join([parameters, key, lengths, *ciphertexts])), dtype=torch.uint8)
    )


def split_ciphertexts(sealed: EncryptedValues, ciphertext_format: CiphertextFormat, scalars: int) -> list[bytes]:
    """The ciphertexts of something that :func:`measure_ciphertexts` has passed."""
    raw, many = sealed.data.numpy(), ciphertext_format.ciphertexts(scalars)
    ends = np.cumsum([_LENGTHS + _WIDTH * many, *_lengths(raw, many).tolist()])
    return [raw[start:end].tobytes() for start, end in pairwise(ends)]


def get_key_id(sealed: EncryptedValues) -> bytes:
    """16 bytes that name the key."""
    return sealed.data.numpy()[_KEY].tobytes()


def measure_ciphertexts(raw: np.ndarray, scalars: int, ciphertext_format: CiphertextFormat) -> int:
    """Bytes of the section at the start of ``raw`` (uint8) that carries ``scalars`` values, each length held against
    what a ciphertext can have.

    Raises:
        RejectedMessage: too short, too long, or of other parameters.
    """
    many = ciphertext_format.ciphertexts(scalars)
    head = _LENGTHS + _WIDTH * many
    if raw.size < head:
        raise RejectedMessage("E_LEN", "ciphertexts", f"at least {head} bytes", raw.size)
    found = raw[_PARAMETERS].tobytes()
    if found != ciphertext_format.parameters:
        raise RejectedMessage("E_CONTEXT", "parameters", ciphertext_format.parameters.hex(), found.hex())
    lengths = _lengths(raw, many)
    if many and int(lengths.max()) > ciphertext_format.most_bytes:
        raise RejectedMessage(
            "E_SIZE", "ciphertext", f"at most {ciphertext_format.most_bytes} bytes", int(lengths.max())
        )
    return head + int(lengths.sum(dtype=np.int64))


def _lengths(raw: np.ndarray, many: int) -> np.ndarray:
    """uint32 ``(many,)``; the bytes need not be aligned."""
    return np.frombuffer(raw[_LENGTHS : _LENGTHS + _WIDTH * many].tobytes(), "<u4")
