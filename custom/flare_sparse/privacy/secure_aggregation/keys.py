"""The public keys of one site for one sum, signed by the site."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import Self

from ...core.errors import RejectedMessage
from .identities import MAX_CERTIFICATE_BYTES, MAX_SIGNATURE_BYTES, RootCertificate, SiteIdentity
from .pads import SumId

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
        return replace(self, certificate=identity.certificate, signature=identity.sign(self.list_signed(sum_id)))

    def verify(self, root: RootCertificate, sum_id: SumId) -> None:
        """Check certificate and signature.

        Raises:
            RejectedMessage: the keys are not those that this site signed for this sum.
        """
        root.verify(self.name, self.certificate, self.list_signed(sum_id), self.signature)

    def list_signed(self, sum_id: SumId) -> bytes:
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
