"""CKKS by TenSEAL: a context's parameters, one ciphertext in and out. Nothing from outside is parsed unbounded."""

from __future__ import annotations

import hashlib
import struct
import tempfile
from pathlib import Path
from typing import Any

import zstandard

from ..errors import ConfigError, RejectedMessage
from ..wire.plan import CiphertextFormat
from .contexts import CLIENT_FILE, import_tenseal

_MAGIC = b"\x5e\xa1"
_SEAL_HEADER = 16  # magic, sizes, version, compression, reserved, and the length of it all as uint64
_SCALE_BYTES = 9  # at the end of TenSEAL's form of a vector
_PLAIN, _ZSTD = 0, 2  # SEAL's codes of a compression
_PRIMES_BYTES = 8  # SEAL keeps each residue in 64 bits
_SLACK = 1024  # SEAL's own fields of a ciphertext, and what compression adds to what cannot be compressed
_SPARE_BITS = 2  # sign, and the rounding of the largest value


class Scheme:
    """The parameters of a context.

    Args:
        context: bytes of a file of FLARE's ``HEBuilder``, or of ``KeyContexts``.

    Attributes:
        ciphertext_format: what the wire must know.
        limit: largest value that a sum may have without wrapping around.

    Raises:
        ConfigError: TenSEAL is not installed, or this is no CKKS context that allows one multiplication.
    """

    def __init__(self, context: bytes):
        self.ts = import_tenseal()
        try:
            self.context: Any = self.ts.context_from(context)
            seal = self.context.seal_context().data
            self.scale = float(self.context.global_scale)
            first, last = seal.first_context_data(), seal.last_context_data()
            degree = int(first.parms().poly_modulus_degree())
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"not a TenSEAL context with CKKS parameters and a scale: {error}") from error
        if first.chain_index() != 1:
            raise ConfigError(
                f"the TenSEAL context allows {first.chain_index()} multiplications, exactly 1 is used: give HEBuilder "
                "three coeff_mod_bit_sizes, such as [60, 40, 40]"
            )
        self.fresh, self.summed = list(first.parms_id()), list(last.parms_id())
        self.limit = 2.0 ** (last.total_coeff_modulus_bit_count() - _SPARE_BITS) / self.scale
        name = struct.pack("<4Qd", *seal.key_context_data().parms_id(), self.scale)
        self._most = 2 * 2 * degree * _PRIMES_BYTES + _SLACK  # two polynomials, two primes
        largest = _SEAL_HEADER + self._most + self._most // 128
        self.ciphertext_format = CiphertextFormat(hashlib.sha256(name).digest()[:8], degree // 2, largest)

    def key(self) -> bytes:
        """16 bytes that name the secret key: a hash of its coefficients, which tells nothing of them.

        Raises:
            ConfigError: there is none in this context.
        """
        if not self.context.has_secret_key():
            raise ConfigError(f"this TenSEAL context has no secret key; a site needs its kit's {CLIENT_FILE}")
        with tempfile.TemporaryDirectory() as folder:  # TenSEAL gives a key's bytes to files only; ours to read alone
            file = Path(folder) / "key"
            self.context.secret_key().data.save(str(file))
            content = self._inflated(file.read_bytes(), 1 << 24)
        return hashlib.sha256(b"flare-sparse key" + content).digest()[:16]

    def written(self, vector: Any) -> bytes:
        """The ciphertext of a CKKS vector of one ciphertext, in SEAL's form."""
        whole: bytes = vector.serialize()
        count = vector.size()
        found = whole[whole.index(_MAGIC) : -_SCALE_BYTES]
        if self._framed(found, count) != whole:
            raise ConfigError("this version of TenSEAL writes vectors in another form; install one that was tested")
        return found

    def read(self, data: bytes, count: int) -> Any:
        """A CKKS vector of ``count`` values from a ciphertext that came from outside.

        Raises:
            RejectedMessage: it is not one of these parameters, or inflates beyond what one can have.
        """
        self._inflated(data, self._most)
        try:
            vector = self.ts.ckks_vector_from(self.context, self._framed(data, count))
            (ciphertext,) = vector.ciphertext()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise RejectedMessage("E_CIPHERTEXT", "ciphertext", "one of CKKS", str(error)[:80]) from error
        found = (vector.size(), ciphertext.size(), float(ciphertext.scale), ciphertext.is_transparent())
        if found != (count, 2, self.scale, False):
            raise RejectedMessage("E_CIPHERTEXT", "size, parts, scale", (count, 2, self.scale, False), found)
        return vector

    @staticmethod
    def level(vector: Any) -> list[int]:
        """Which of ``fresh`` and ``summed`` a vector is at."""
        return list(vector.ciphertext()[0].parms_id())

    def _framed(self, data: bytes, count: int) -> bytes:
        """TenSEAL's own form of a vector, around a ciphertext in SEAL's: nothing in it is the sender's but ``data``."""
        return self._envelope(count, len(data)) + data + b"\x19" + struct.pack("<d", self.scale)

    @staticmethod
    def _envelope(count: int, length: int) -> bytes:
        size = _varint(count)
        return b"\x0a" + _varint(len(size)) + size + b"\x12" + _varint(length)

    @staticmethod
    def _inflated(data: bytes, most: int) -> bytes:
        """What SEAL wrote, uncompressed; SEAL itself would inflate a small frame to any size.

        Raises:
            RejectedMessage: not in SEAL's form, or larger than ``most``.
        """
        if len(data) < _SEAL_HEADER or data[:2] != _MAGIC or struct.unpack("<Q", data[8:16])[0] != len(data):
            raise RejectedMessage("E_CIPHERTEXT", "ciphertext", "SEAL's form", "another")
        if data[5] not in (_PLAIN, _ZSTD):
            raise RejectedMessage("E_CIPHERTEXT", "compression", (_PLAIN, _ZSTD), data[5])
        content = data[_SEAL_HEADER:]
        if data[5] == _ZSTD:
            try:
                content = zstandard.ZstdDecompressor().stream_reader(content).read(most + 1)
            except zstandard.ZstdError as error:
                raise RejectedMessage("E_CIPHERTEXT", "compression", "a zstd frame", str(error)) from error
        if len(content) > most:
            raise RejectedMessage("E_SIZE", "ciphertext", f"at most {most} bytes", "more, once inflated")
        return content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
