"""Signatures of sites, checked against the root certificate of their federation.

The server relays the sites' public keys. Without signatures it could replace each by a key of its own and read
everything; with them it can only leave out sites.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import NameOID

from ...core.errors import ConfigError, RejectedMessage

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
MAX_CERTIFICATE_BYTES, MAX_SIGNATURE_BYTES = 2048, 512
"""FLARE's certificates have about 800 bytes, and RSA of 4096 bits has signatures of 512."""
ROOT_FILE, CERTIFICATE_FILE, KEY_FILE = "rootCA.pem", "client.crt", "client.key"
"""FLARE's file names, in the folder ``startup`` of a startup kit."""
_PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


class RootCertificate:
    """Root certificate of a federation.

    Args:
        content: PEM of the certificate, ``rootCA.pem`` of a startup kit.

    Raises:
        ConfigError: it is no certificate.
    """

    def __init__(self, content: bytes):
        self._certificate = _parse_certificate(content, "rootCA.pem")

    def verify(self, name: str, certificate: bytes, data: bytes, signature: bytes) -> None:
        """Check that site ``name`` has signed ``data``.

        Args:
            name: name of the site.
            certificate: DER of the site's certificate; not trusted.
            data: what is signed.
            signature: not trusted.

        Raises:
            RejectedMessage: the certificate is not one that this root issued to that site and that is valid now, or
                the signature is not the site's.
        """
        try:
            parsed = x509.load_der_x509_certificate(certificate)
            parsed.verify_directly_issued_by(self._certificate)
            names = [str(part.value) for part in parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
            is_valid = parsed.not_valid_before_utc <= datetime.now(UTC) <= parsed.not_valid_after_utc
            key = parsed.public_key()
        except (ValueError, TypeError, InvalidSignature, x509.UnsupportedGeneralNameType) as error:
            raise RejectedMessage(
                "E_SIGNATURE", "certificate", "one of the federation's root", "another", name
            ) from error
        if names != [name] or not is_valid:
            expected, found = f"a valid certificate of {name}", f"of {names}, valid: {is_valid}"
            raise RejectedMessage("E_SIGNATURE", "certificate", expected, found, name)
        try:
            if isinstance(key, rsa.RSAPublicKey):
                key.verify(signature, data, _PSS, hashes.SHA256())
            elif isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
            else:
                raise InvalidSignature
        except InvalidSignature as error:
            raise RejectedMessage("E_SIGNATURE", "signature", f"one of {name}", "another", name) from error


@dataclass(frozen=True)
class SiteIdentity:
    """What a site signs with, and the root that it checks the others against.

    Attributes:
        name: name of the site.
        certificate: DER of the site's certificate.
        key: its private key.
        root: root certificate of the federation.
    """

    name: str
    certificate: bytes
    key: PrivateKey
    root: RootCertificate

    @classmethod
    def from_pem(cls, name: str, certificate: bytes, key: bytes, root: bytes) -> SiteIdentity:
        """Return the identity in the files of a startup kit.

        Args:
            name: name of the site.
            certificate: content of ``client.crt``.
            key: content of ``client.key``.
            root: content of ``rootCA.pem``.

        Raises:
            ConfigError: a file cannot be read, or the key is neither RSA nor of an elliptic curve.
        """
        try:
            private_key = serialization.load_pem_private_key(key, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"wire.aggregation: masked: client.key of {name} cannot be read: {error}") from error
        if not isinstance(private_key, PrivateKey):
            raise ConfigError(f"wire.aggregation: masked: client.key of {name} is neither RSA nor of an elliptic curve")
        parsed = _parse_certificate(certificate, f"client.crt of {name}")
        return cls(name, parsed.public_bytes(serialization.Encoding.DER), private_key, RootCertificate(root))

    def sign(self, data: bytes) -> bytes:
        """Return the site's signature of ``data``: RSA-PSS or ECDSA, with SHA-256."""
        if isinstance(self.key, rsa.RSAPrivateKey):
            return self.key.sign(data, _PSS, hashes.SHA256())
        return self.key.sign(data, ec.ECDSA(hashes.SHA256()))


def generate_kits(names: Iterable[str]) -> dict[str, dict[str, bytes]]:
    """Generate certificates of one root, for a run with server (``""``) and sites on one machine.

    The signatures then prove nothing: that process has every key. They are made so that such a run sends and
    checks the same messages as a provisioned one. The keys are of RSA, as FLARE's, so that messages have their length.
    """
    root = _generate_root()[0].public_bytes(serialization.Encoding.PEM)
    return {"": {ROOT_FILE: root}, **{name: {**_generate_kit(name), ROOT_FILE: root} for name in names}}


@cache
def _generate_root() -> tuple[x509.Certificate, rsa.RSAPrivateKey]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return _issue("flare-sparse one-machine root", key, None, key), key


@cache
def _generate_kit(name: str) -> dict[str, bytes]:
    # Once per process and name: an RSA key takes a tenth of a second.
    root, root_key = _generate_root()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    certificate = _issue(name, key, root, root_key).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {CERTIFICATE_FILE: certificate, KEY_FILE: private}


def _issue(
    name: str, key: rsa.RSAPrivateKey, issuer: x509.Certificate | None, issuer_key: rsa.RSAPrivateKey
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.now(UTC) - timedelta(minutes=5)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=360))
        .sign(issuer_key, hashes.SHA256())
    )


def _parse_certificate(content: bytes, file: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise ConfigError(f"wire.aggregation: masked: {file} is no certificate: {error}") from error
