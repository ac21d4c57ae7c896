"""Encrypted values on the wire. Lengths are checked before any ciphertext is parsed.

A section holds: parameters (8 bytes) | key id (16 bytes) | length of each ciphertext (uint32) | ciphertexts.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from ..core.errors import RejectedMessage
from ..core.exchange import SealedValues
from .plan import CiphertextFormat

_PARAMETERS, _KEY_ID = slice(0, 8), slice(8, 24)
_LENGTHS_START = 24
_LENGTH_BYTES = 4


def join_ciphertexts(parameters: bytes, key_id: bytes, ciphertexts: Sequence[bytes]) -> SealedValues:
    """Return the values section of a message with encrypted values.

    Args:
        parameters: 8 bytes that identify the encryption parameters.
        key_id: 16 bytes that identify the key.
        ciphertexts: the ciphertexts, in the order of the values.
    """
    lengths = np.array([len(ciphertext) for ciphertext in ciphertexts], "<u4").tobytes()
    section = bytearray(b"".join([parameters, key_id, lengths, *ciphertexts]))
    return SealedValues(torch.frombuffer(section, dtype=torch.uint8))


def split_ciphertexts(encrypted: SealedValues, ciphertext_format: CiphertextFormat, scalars: int) -> list[bytes]:
    """Return the ciphertexts of a section that :func:`measure_ciphertexts` accepts."""
    section, count = encrypted.data.numpy(), ciphertext_format.count_ciphertexts(scalars)
    bounds = np.cumsum([_LENGTHS_START + _LENGTH_BYTES * count, *_read_lengths(section, count).tolist()])
    return [section[start:end].tobytes() for start, end in pairwise(bounds)]


def get_key_id(encrypted: SealedValues) -> bytes:
    """Return the 16 bytes that identify the key."""
    return encrypted.data.numpy()[_KEY_ID].tobytes()


def measure_ciphertexts(buffer: np.ndarray, scalars: int, ciphertext_format: CiphertextFormat) -> int:
    """Return the length in bytes of the section that carries ``scalars`` values.

    Args:
        buffer: uint8, starts with the section; may be longer.
        scalars: number of values.
        ciphertext_format: the receiver's own parameters and limits.

    Raises:
        RejectedMessage: the buffer is too short, the parameters differ, or a ciphertext is longer than possible.
    """
    # The number of ciphertexts follows from the receiver's slots per ciphertext, never from the message.
    count = ciphertext_format.count_ciphertexts(scalars)
    head_bytes = _LENGTHS_START + _LENGTH_BYTES * count
    if buffer.size < head_bytes:
        raise RejectedMessage("E_LEN", "ciphertexts", f"at least {head_bytes} bytes", buffer.size)
    parameters = buffer[_PARAMETERS].tobytes()
    if parameters != ciphertext_format.parameters:
        raise RejectedMessage("E_CONTEXT", "parameters", ciphertext_format.parameters.hex(), parameters.hex())
    lengths = _read_lengths(buffer, count)
    longest = int(lengths.max()) if count else 0
    if longest > ciphertext_format.max_bytes:
        raise RejectedMessage("E_SIZE", "ciphertext", f"at most {ciphertext_format.max_bytes} bytes", longest)
    # int64: a sum of uint32 lengths could wrap around to a small number.
    return head_bytes + int(lengths.sum(dtype=np.int64))


def _read_lengths(section: np.ndarray, count: int) -> np.ndarray:
    """Return the ciphertexts' lengths, uint32 ``(count,)``."""
    # Copied, because the section need not start at a multiple of 4.
    return np.frombuffer(section[_LENGTHS_START : _LENGTHS_START + _LENGTH_BYTES * count].tobytes(), "<u4")
