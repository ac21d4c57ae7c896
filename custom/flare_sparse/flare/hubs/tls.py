"""Mutual TLS between a hub and its sites, with the certificates of their startup kits."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..kits import CERTIFICATE_FILE, KEY_FILE, ROOT_FILE


def build_context(startup: Path, *, is_hub: bool) -> ssl.SSLContext:
    """Return the context of one end; either end accepts only certificates of the federation's own root.

    Args:
        startup: folder ``startup`` of the startup kit.
        is_hub: the end that listens.

    Raises:
        ConfigError: a certificate or the key is missing or cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_hub else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The name that counts is that of the participant in the certificate (read_common_name), as everywhere in FLARE:
    # several participants may share a host.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
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
