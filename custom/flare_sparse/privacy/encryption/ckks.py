"""CKKS through TenSEAL: the parameters of a context, and ciphertexts as bytes with bounds on what is parsed."""

import hashlib
import struct
import tempfile
from pathlib import Path
from typing import Any

import zstandard

from ...core.errors import ConfigError, RejectedMessage
from ...wire.plan import CiphertextFormat
from .contexts import CLIENT_FILE, import_tenseal

_MAGIC = b"\x5e\xa1"
# SEAL's header: magic, header size, version, compression, reserved, and the total length as uint64.
_SEAL_HEADER_BYTES = 16
# Tag and float64 at the end of TenSEAL's serialized vector.
_SCALE_BYTES = 9
# SEAL's codes of its compression modes.
_PLAIN, _ZSTD = 0, 2
# SEAL stores each residue in 64 bits.
_RESIDUE_BYTES = 8
# For SEAL's own fields of a ciphertext, and for what compression adds to incompressible data.
_SLACK_BYTES = 1024
# One for the sign, one for the rounding of the largest value.
_SPARE_BITS = 2


class Scheme:
    """A TenSEAL context and its CKKS parameters.

    Args:
        context: content of a file that FLARE's ``HEBuilder`` or ``KeyContexts`` wrote.

    Attributes:
        ts: the TenSEAL module.
        context: the TenSEAL context.
        scale: factor by which CKKS multiplies values before it rounds them to integers.
        fresh_level: SEAL's parameter id of a freshly encrypted ciphertext.
        summed_level: SEAL's parameter id after the one multiplication.
        ciphertext_format: sizes and parameters of ciphertexts, as the wire needs them.
        max_value: largest absolute value that a sum may have without wrapping around.

    Raises:
        ConfigError: TenSEAL is not installed, or this is not a CKKS context that allows exactly one multiplication.
    """

    def __init__(self, context: bytes):
        self.ts = import_tenseal()
        try:
            self.context: Any = self.ts.context_from(context)
            seal = self.context.seal_context().data
            self.scale = float(self.context.global_scale)
            fresh, summed = seal.first_context_data(), seal.last_context_data()
            degree = int(fresh.parms().poly_modulus_degree())
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"not a TenSEAL context with CKKS parameters and a scale: {error}") from error
        if fresh.chain_index() != 1:
            raise ConfigError(
                f"the TenSEAL context allows {fresh.chain_index()} multiplications, but exactly 1 is used: give "
                "HEBuilder three coeff_mod_bit_sizes, such as [60, 40, 40]"
            )
        self.fresh_level, self.summed_level = list(fresh.parms_id()), list(summed.parms_id())
        # Coefficients are residues of one modulus: a larger value would wrap around and decrypt to another number.
        self.max_value = 2.0 ** (summed.total_coeff_modulus_bit_count() - _SPARE_BITS) / self.scale
        parameters = struct.pack("<4Qd", *seal.key_context_data().parms_id(), self.scale)
        # A fresh ciphertext has two polynomials, each with a residue per coefficient and prime (two primes).
        self._max_content_bytes = 2 * 2 * degree * _RESIDUE_BYTES + _SLACK_BYTES
        # Compression can lengthen incompressible content slightly.
        max_bytes = _SEAL_HEADER_BYTES + self._max_content_bytes + self._max_content_bytes // 128
        self.ciphertext_format = CiphertextFormat(hashlib.sha256(parameters).digest()[:8], degree // 2, max_bytes)

    def compute_key_id(self) -> bytes:
        """Return 16 bytes that identify the secret key: a hash of its coefficients, which does not reveal them.

        Raises:
            ConfigError: the context has no secret key.
        """
        if not self.context.has_secret_key():
            raise ConfigError(f"this TenSEAL context has no secret key; a site needs its kit's {CLIENT_FILE}")
        # TenSEAL writes a key to files only. A temporary directory is readable by its owner alone.
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "key"
            self.context.secret_key().data.save(str(file))
            content = self._decompress(file.read_bytes(), 1 << 24)
        return hashlib.sha256(b"flare-sparse key" + content).digest()[:16]

    def serialize_vector(self, vector: Any) -> bytes:
        """Return the ciphertext of a CKKS vector that has one ciphertext, in SEAL's format.

        Raises:
            ConfigError: this version of TenSEAL serializes vectors in a format that is not known here.
        """
        serialized: bytes = vector.serialize()
        ciphertext = serialized[serialized.index(_MAGIC) : -_SCALE_BYTES]
        # TenSEAL does not document its format: reassembling proves that nothing was cut off.
        if self._wrap_ciphertext(ciphertext, vector.size()) != serialized:
            raise ConfigError("this version of TenSEAL serializes vectors in an unknown format; install a tested one")
        return ciphertext

    def parse_ciphertext(self, data: bytes, count: int) -> Any:
        """Return the CKKS vector of ``count`` values of a ciphertext that is not trusted.

        Raises:
            RejectedMessage: it has other parameters, or decompresses to more than a ciphertext can have.
        """
        # Decompressed under a bound first: SEAL itself would expand a small frame to any size.
        self._decompress(data, self._max_content_bytes)
        try:
            vector = self.ts.ckks_vector_from(self.context, self._wrap_ciphertext(data, count))
            (ciphertext,) = vector.ciphertext()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise RejectedMessage("E_CIPHERTEXT", "ciphertext", "a CKKS ciphertext", str(error)[:80]) from error
        # SEAL checks parameters and polynomials, but not that the scale and the number of parts are those of one
        # encryption. A transparent ciphertext is plain text that anyone can read.
        properties = (vector.size(), ciphertext.size(), float(ciphertext.scale), ciphertext.is_transparent())
        if properties != (count, 2, self.scale, False):
            raise RejectedMessage("E_CIPHERTEXT", "size, parts, scale", (count, 2, self.scale, False), properties)
        return vector

    @staticmethod
    def get_level(vector: Any) -> list[int]:
        """Return SEAL's parameter id of a vector: ``fresh_level`` or ``summed_level``."""
        return list(vector.ciphertext()[0].parms_id())

    def _wrap_ciphertext(self, data: bytes, count: int) -> bytes:
        """Return TenSEAL's serialized vector (a protobuf message) for a ciphertext in SEAL's format."""
        # Built here and never received: count and scale are the receiver's own.
        size = _encode_varint(count)
        prefix = b"\x0a" + _encode_varint(len(size)) + size + b"\x12" + _encode_varint(len(data))
        return prefix + data + b"\x19" + struct.pack("<d", self.scale)

    @staticmethod
    def _decompress(data: bytes, max_bytes: int) -> bytes:
        """Return the decompressed content of an object in SEAL's format.

        Raises:
            RejectedMessage: it is not in SEAL's format, or its content has more than ``max_bytes``.
        """
        if len(data) < _SEAL_HEADER_BYTES or data[:2] != _MAGIC or struct.unpack("<Q", data[8:16])[0] != len(data):
            raise RejectedMessage("E_CIPHERTEXT", "ciphertext", "SEAL's format", "another one")
        if data[5] not in (_PLAIN, _ZSTD):
            raise RejectedMessage("E_CIPHERTEXT", "compression", (_PLAIN, _ZSTD), data[5])
        content = data[_SEAL_HEADER_BYTES:]
        if data[5] == _ZSTD:
            try:
                content = zstandard.ZstdDecompressor().stream_reader(content).read(max_bytes + 1)
            except zstandard.ZstdError as error:
                raise RejectedMessage("E_CIPHERTEXT", "compression", "a zstd frame", str(error)) from error
        if len(content) > max_bytes:
            raise RejectedMessage("E_SIZE", "ciphertext", f"at most {max_bytes} bytes", "more once decompressed")
        return content


def _encode_varint(number: int) -> bytes:
    """Return a protobuf varint: 7 bits per byte, lowest first, the high bit set on all but the last byte."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])
