"""Addresses of hubs: a file in the startup kit of a hub and of each of its sites, never part of a job.

``local/flare_sparse_hubs.yaml`` reads, at a site::

    hub-1: hub-1.hospital.org:8110    # the hubs that this site may send values to, and where each listens

At a hub, its own name has the address on which it listens, such as ``hub-1: 0.0.0.0:8110``.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from ...config.yaml_files import read_yaml
from ...core.errors import ConfigError

HUBS_FILE = "flare_sparse_hubs.yaml"


def find_address(local: Path, hub: str) -> tuple[str, int]:
    """Return host and port of a hub, as this participant's own file names them.

    Args:
        local: folder ``local`` of the startup kit.
        hub: name of the hub.

    Raises:
        ConfigError: the file is missing or malformed, or does not name the hub.
    """
    file = local / HUBS_FILE
    if not file.is_file():
        raise ConfigError(f"{file}: missing; the job has {hub}. Write a line '{hub}: HOST:PORT' into it (docs/hubs.md)")
    text = read_yaml(file).get(hub)
    if text is None:
        raise ConfigError(f"{file}: {hub}: no address; write a line '{hub}: HOST:PORT' into it, or refuse the job")
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.username is not None or parts.netloc != text:
        raise ConfigError(
            f"{file}: {hub}: expected HOST:PORT, such as hub-1.hospital.org:8110, found {str(text)[:80]!r}"
        )
    return host, port
