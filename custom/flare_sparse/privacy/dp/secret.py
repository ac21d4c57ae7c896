"""A site's secret and the random numbers derived from it.

Noise that anyone with the job could compute would protect nothing, so it is never derived from the job's seed. The
stream is ChaCha20 and not torch's generator: the state of a Mersenne Twister can be computed from its numbers.
"""

import hashlib
import hmac
import math
import secrets
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from ...core.checkpoint.writing import sync_to_disk, write_new_file
from ...core.errors import CheckpointError

SECRET_BYTES = 32


def create_secret() -> bytes:
    """Return a new secret from the operating system's generator."""
    return secrets.token_bytes(SECRET_BYTES)


def read_secret(file: Path) -> bytes:
    """Return the secret of a file, which is created with a random one if it does not exist.

    Raises:
        CheckpointError: the file cannot be read or written, or is damaged.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            write_new_file(file, create_secret())
            sync_to_disk(file.parent)
        except FileExistsError:
            pass
        secret = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: the site's secret cannot be read: {error.strerror or error}") from error
    # A short secret could be guessed; another one would give a repeated question a second answer, at a second charge.
    if len(secret) != SECRET_BYTES:
        raise CheckpointError(
            f"{file}: expected {SECRET_BYTES} bytes, found {len(secret)}; restore it, or delete it for a new secret, "
            "with which repeated rounds are charged again"
        )
    return secret


def derive_key(secret: bytes, *labels: object) -> bytes:
    """Return a key of 32 bytes for the labels; without the secret it looks random."""
    # The length of each label keeps ("a", "bc") and ("ab", "c") apart.
    parts = [label if isinstance(label, bytes) else str(label).encode() for label in labels]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(secret, text, hashlib.sha256)


def draw_uniform(key: bytes, count: int) -> Tensor:
    """Return float64 ``(count,)`` uniform numbers between 0 and 1, both excluded, that the key determines."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    bits = np.frombuffer(cipher.update(bytes(8 * count)), dtype="<u8") >> 11
    return torch.from_numpy((bits + 0.5) * 2.0**-53)


def draw_normal(key: bytes, count: int) -> Tensor:
    """Return float64 ``(count,)`` standard normal numbers that the key determines (Box and Muller 1958)."""
    half = (count + 1) // 2
    uniform = draw_uniform(key, 2 * half)
    radius, angle = (-2 * uniform[:half].log()).sqrt(), 2 * math.pi * uniform[half:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
