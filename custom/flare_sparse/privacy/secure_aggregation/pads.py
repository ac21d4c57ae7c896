"""Keys and pads of one sum: X25519, HKDF with SHA-256, ChaCha20 and ChaCha20-Poly1305 of the library ``cryptography``.

Every key is used once: the X25519 keys behind it are new for each attempt, and its purpose, the id of the sum and both
names enter its derivation.
"""

import struct
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...core.errors import RejectedMessage
from ...wire.envelope import is_kind

KEY_BYTES, TAG_BYTES = 32, 16
_ID = struct.Struct("<8sQI16s")
# Each key encrypts one message or stream, so one nonce for all of them is never repeated under one key.
_NONCE, _STREAM_NONCE = bytes(12), bytes(16)


@dataclass(frozen=True)
class SumId:
    """What identifies one sum: every attempt has its own.

    Attributes:
        run: id of the run, 16 hex digits.
        kind, round: of the request whose updates are summed.
        sequence: number of the attempt.
    """

    run: str
    kind: str
    round: int
    sequence: int

    def to_bytes(self) -> bytes:
        """Return the id in 36 bytes."""
        return _ID.pack(bytes.fromhex(self.run), self.sequence, self.round, self.kind.encode("ascii"))


def read_sum_id(data: bytes) -> SumId:
    """Return the id in 36 bytes that are not trusted.

    Raises:
        RejectedMessage: the kind is not printable ASCII, padded with zeros.
    """
    run, sequence, t, kind = _ID.unpack(data)
    name = kind.rstrip(b"\0").decode("latin-1")
    if not is_kind(name):
        raise RejectedMessage("E_KIND", "kind", "printable ASCII, zero-padded", kind)
    return SumId(run.hex(), name, t, sequence)


def get_public_key(private_key: bytes) -> bytes:
    """Return the X25519 public key, 32 bytes, of a private one."""
    return X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def agree(private_key: bytes, public_key: bytes, purpose: str, sum_id: SumId, names: tuple[str, str]) -> bytes:
    """Return the key, 32 bytes, that two sites share for one purpose in one sum.

    Args:
        private_key: X25519 key of one site.
        public_key: X25519 key of the other; not trusted.
        purpose: what the key is for.
        sum_id: id of the sum.
        names: both names, in an order that both sites know.

    Raises:
        RejectedMessage: the public key is one of the few with which everyone agrees on zeros.
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(private_key).exchange(
            X25519PublicKey.from_public_bytes(public_key)
        )
    except ValueError as error:
        raise RejectedMessage("E_SIGNATURE", "public key", "an X25519 key", "a key of small order") from error
    info = b"\0".join([b"flare-sparse", purpose.encode(), sum_id.to_bytes(), *(name.encode() for name in names)])
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def derive_key(seed: bytes, purpose: str, sum_id: SumId, name: str) -> bytes:
    """Return the key, 32 bytes, of a site's own seed for one purpose in one sum."""
    info = b"\0".join([b"flare-sparse", purpose.encode(), sum_id.to_bytes(), name.encode()])
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(seed)


def draw_pad(key: bytes, size: int) -> np.ndarray:
    """Return the pad of a key: uint8 ``(size,)``, the first bytes of its ChaCha20 stream."""
    encryptor = Cipher(ChaCha20(key, _STREAM_NONCE), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(size)), np.uint8)


def encrypt_shares(key: bytes, shares: bytes) -> bytes:
    """Return the box with shares that only the site with the same key opens, and in which every change shows."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, shares, None)


def decrypt_shares(key: bytes, box: bytes, sender: str) -> bytes:
    """Return the content of a box.

    Raises:
        RejectedMessage: it was not made with this key.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, box, None)
    except InvalidTag as error:
        expected = f"those of {sender} for this site, in a sum over the same model"
        raise RejectedMessage("E_SHARE", "shares", expected, "others", sender) from error
