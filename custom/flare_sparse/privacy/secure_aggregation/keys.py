"""The public keys of one site for one sum, signed by the site.

Shares of a secret, of which ``threshold`` recover it and fewer say nothing about it.

Shamir, "How to Share a Secret", CACM 1979: the shares are values of a random polynomial over a prime field. No
maintained library that this package depends on has it; it needs integer arithmetic only.

Keys and pads of one sum: X25519, HKDF with SHA-256, ChaCha20 and ChaCha20-Poly1305 of the library ``cryptography``.

Every key is used once: the X25519 keys behind it are new for each attempt, and its purpose, the id of the sum and both
names enter its derivation.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...core.errors import RejectedMessage
from ...wire.steps import SumId
from .identities import MAX_CERTIFICATE_BYTES, MAX_SIGNATURE_BYTES, RootCertificate, SiteIdentity

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
    # Interpolate at 0 (Lagrange).
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


KEY_BYTES, TAG_BYTES = 32, 16
# Each key encrypts one message or stream, so one nonce for all of them is never repeated under one key.
_NONCE, _STREAM_NONCE = bytes(12), bytes(16)


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
    return derive_key(secret, purpose, sum_id, *names)


def derive_key(seed: bytes, purpose: str, sum_id: SumId, *names: str) -> bytes:
    """Return the key, 32 bytes, of a seed of one site or two for one purpose in one sum."""
    info = b"\0".join([b"flare-sparse", purpose.encode(), sum_id.to_bytes(), *(name.encode() for name in names)])
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


_HEAD = struct.Struct("<Q32s32s32sHH")
MAX_KEYS_BYTES = _HEAD.size + MAX_CERTIFICATE_BYTES + MAX_SIGNATURE_BYTES


@dataclass(frozen=True)
class SignedKeys:
    """What a site publishes before a sum.

    Attributes:
        name: name of the site; it does not travel with the keys, the receiver knows whose they are.
        num_examples: number of training examples of the site, from which every site computes the weights of the sum.
        channel_key: X25519 key, 32 bytes, for the boxes with shares.
        pad_key: X25519 key, 32 bytes, for the pads that cancel.
        commitment: SHA-256 of the seed of the site's own pad: the server notices a wrong share of it.
        certificate: DER of the site's certificate.
        signature: signature of all of these and of the id of the sum.
    """

    name: str
    num_examples: int
    channel_key: bytes
    pad_key: bytes
    commitment: bytes
    certificate: bytes = b""
    signature: bytes = b""

    def sign(self, identity: SiteIdentity, sum_id: SumId) -> Self:
        """Return the keys with certificate and signature."""
        return replace(self, certificate=identity.certificate, signature=identity.sign(self.encode_signed(sum_id)))

    def verify(self, root: RootCertificate, sum_id: SumId) -> None:
        """Check certificate and signature.

        Raises:
            RejectedMessage: the keys are not those that this site signed for this sum.
        """
        root.verify(self.name, self.certificate, self.encode_signed(sum_id), self.signature)

    def encode_signed(self, sum_id: SumId) -> bytes:
        """Return what the site signs: the id of the sum, number of examples, public keys, commitment and name."""
        head = b"flare-sparse keys of a sum\0" + sum_id.to_bytes() + struct.pack("<Q", self.num_examples)
        return head + self.channel_key + self.pad_key + self.commitment + self.name.encode()

    def to_bytes(self) -> bytes:
        """Return the keys as they travel."""
        head = _HEAD.pack(
            self.num_examples,
            self.channel_key,
            self.pad_key,
            self.commitment,
            len(self.certificate),
            len(self.signature),
        )
        return head + self.certificate + self.signature

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> SignedKeys:
        """Return the keys of site ``name`` in ``data``, which is not trusted; :meth:`verify` checks them.

        Raises:
            RejectedMessage: the length is wrong.
        """
        if not _HEAD.size <= len(data) <= MAX_KEYS_BYTES:
            raise RejectedMessage("E_LEN", "keys", f"{_HEAD.size} to {MAX_KEYS_BYTES} bytes", len(data), name)
        num_examples, channel_key, pad_key, commitment, certificate_bytes, signature_bytes = _HEAD.unpack_from(data)
        end = _HEAD.size + certificate_bytes
        if len(data) != end + signature_bytes:
            raise RejectedMessage("E_LEN", "keys", end + signature_bytes, len(data), name)
        return cls(name, num_examples, channel_key, pad_key, commitment, data[_HEAD.size : end], data[end:])


def commit_to(seed: bytes) -> bytes:
    """Return the commitment to a random seed of 32 bytes; it says nothing about the seed."""
    return hashlib.sha256(b"flare-sparse seed" + seed).digest()
