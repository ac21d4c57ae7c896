"""Certificates of hubs and sites, as FLARE's provisioning issues them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """A root that issues certificates for participants, as FLARE's provisioning does."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.root = self._issue("root", self.key, is_root=True)

    def _issue(self, name: str, key: ec.EllipticCurvePrivateKey, *, is_root: bool = False) -> x509.Certificate:
        now = datetime.now(UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        )
        return builder.sign(self.key, hashes.SHA256())

    def write_kit(self, folder: Path, name: str) -> Path:
        """Write the certificates of a participant, under the names of FLARE's startup kits."""
        folder.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        pem = serialization.Encoding.PEM
        (folder / "rootCA.pem").write_bytes(self.root.public_bytes(pem))
        (folder / "client.crt").write_bytes(self._issue(name, key).public_bytes(pem))
        (folder / "client.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return folder
