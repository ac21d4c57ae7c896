"""Mutual TLS between a hub and its sites, with the certificates of their startup kits.

The name that counts is the common name in the certificate, as everywhere in FLARE: several participants may share a
host. FLARE's certificates of clients have no other name, so that gRPC compares this one.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from ...core.errors import ConfigError
from ..kits import CERTIFICATE_FILE, KEY_FILE, ROOT_FILE


def build_server_credentials(startup: Path) -> grpc.ServerCredentials:
    """Return the credentials of a hub, which accepts only certificates of the federation's own root.

    Args:
        startup: folder ``startup`` of the startup kit.

    Raises:
        ConfigError: a certificate or the key is missing or cannot be read.
    """
    root, key, certificate = _read_kit(startup)
    return grpc.ssl_server_credentials([(key, certificate)], root, require_client_auth=True)


def build_site_credentials(startup: Path) -> grpc.ChannelCredentials:
    """Return the credentials of a site; see :func:`build_server_credentials`."""
    return grpc.ssl_channel_credentials(*_read_kit(startup))


def build_context(startup: Path) -> ssl.SSLContext:
    """Return the TLS context of a site, for a look at the certificate of its hub.

    Raises:
        ConfigError: a certificate or the key is missing or cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(startup / ROOT_FILE)
        context.load_cert_chain(startup / CERTIFICATE_FILE, startup / KEY_FILE)
    except OSError as error:
        raise ConfigError(
            f"federation.hubs: {startup}: {error.strerror or error}. Hubs need a provisioned federation, whose startup "
            "kits have certificates (docs/hubs.md)"
        ) from error
    return context


def read_common_name(connection: ssl.SSLSocket) -> str | None:
    """Return the name of the participant at the other end, from its verified certificate; None without exactly one."""
    subject: Any = (connection.getpeercert() or {}).get("subject", ())
    names = [str(value) for part in subject for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else None


def _read_kit(startup: Path) -> tuple[bytes, bytes, bytes]:
    # gRPC would say of a broken file no more than that the other end cannot be reached.
    build_context(startup)
    root, key, certificate = ((startup / file).read_bytes() for file in (ROOT_FILE, KEY_FILE, CERTIFICATE_FILE))
    return root, key, certificate
