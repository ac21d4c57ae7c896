"""Preflight against a real TLS server that requires certificates, with kits of its project and of another."""

from __future__ import annotations

import datetime as dt
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flare_sparse.core.findings import Finding
from flare_sparse.flare.site.preflight import check_site

BEGIN, END = dt.datetime(2020, 1, 1), dt.datetime(2100, 1, 1)


class Project:
    """A root certificate, and certificates that it signs."""

    def __init__(self, folder: Path):
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        folder.mkdir()
        self.root = self.sign("root", self.key, authority=True)
        (folder / "root.pem").write_bytes(self.root.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool = False) -> x509.Certificate:
        subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, "root"))
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(BEGIN).not_valid_after(END)
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        return builder.sign(self.key, hashes.SHA256())

    def create_participant(self, name: str) -> tuple[Path, Path]:
        """Write a certificate and its key; return both files."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, secret = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        certificate.write_bytes(self.sign(name, key).public_bytes(serialization.Encoding.PEM))
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        secret.write_bytes(key.private_bytes(*form))
        return certificate, secret


@pytest.fixture
def ours(tmp_path: Path) -> Project:
    return Project(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Project:
    return Project(tmp_path / "theirs")


@pytest.fixture(params=["waits", "closes"])
def reaction(request: pytest.FixtureRequest) -> str:
    """What the server does after the handshake: FLARE's server waits for a request."""
    return str(request.param)


@pytest.fixture
def port(ours: Project, reaction: str) -> Iterator[int]:
    """The port of a server of the project that accepts only certificates of the project."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*map(str, ours.create_participant("server")))
    context.load_verify_locations(str(ours.folder / "root.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    done = threading.Event()

    def serve(listener: socket.socket) -> None:
        while not done.is_set():
            with suppress(OSError):
                plain, _ = listener.accept()
                with plain, context.wrap_socket(plain, server_side=True) as secure:
                    if reaction == "waits":
                        secure.recv(1)

    with socket.create_server(("localhost", 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield listener.getsockname()[1]
        done.set()
        thread.join()


def check_server(folder: Path, port: int, root: Project, own: Project, **options: bool) -> Finding:
    """Return the finding about the server for a site with these certificates."""
    startup = folder / "site" / "startup"
    startup.mkdir(parents=True)
    service = {"servers": [{"service": {"target": f"localhost:{port}"}}], "client": {"fqsn": "site"}}
    (startup / "fed_client.json").write_text(json.dumps(service))
    (startup / "rootCA.pem").write_bytes((root.folder / "root.pem").read_bytes())
    for name, file in zip(("client.crt", "client.key"), own.create_participant("site"), strict=True):
        (startup / name).write_bytes(file.read_bytes())
    findings = check_site(startup.parent, environment={}, **options)
    return next(finding for finding in findings if finding.place == "server")


@pytest.mark.slow
def test_certificate_of_the_project_passes_unless_the_server_closes_the_connection(
    tmp_path: Path, port: int, reaction: str, ours: Project
) -> None:
    finding = check_server(tmp_path, port, ours, ours)
    assert finding.severity == ("PASS" if reaction == "waits" else "FAIL")
    assert ("TLSv1.3" if reaction == "waits" else "refuses this certificate after the handshake") in finding.text


def test_server_of_another_project_is_not_trusted(tmp_path: Path, port: int, theirs: Project) -> None:
    finding = check_server(tmp_path, port, theirs, theirs)
    assert finding.severity == "FAIL"
    assert "refuses the TLS handshake" in finding.text


def test_server_may_start_later_than_a_site_is_set_up_but_not_be_another(
    tmp_path: Path, port: int, ours: Project, theirs: Project
) -> None:
    with socket.create_server(("localhost", 0)) as free:
        nobody = free.getsockname()[1]
    for needs_server, severity in ((True, "FAIL"), (False, "WARN")):
        finding = check_server(tmp_path / severity, nobody, ours, ours, needs_server=needs_server)
        assert (finding.severity, "cannot be reached" in finding.text) == (severity, True)
    assert check_server(tmp_path / "other", port, theirs, theirs, needs_server=False).severity == "FAIL"


def test_certificate_that_the_server_refuses_is_reported(
    tmp_path: Path, port: int, ours: Project, theirs: Project
) -> None:
    finding = check_server(tmp_path, port, ours, theirs)
    assert finding.severity == "FAIL"
    assert "Is this the kit of this project?" in finding.text
