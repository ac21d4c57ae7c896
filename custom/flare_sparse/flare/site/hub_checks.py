"""Check whether a participant is ready for its part in a job with hubs: as a hub, as a site of one, or neither."""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path
from typing import Literal

from ...rounds.federation import HubRules
from ..hubs.addresses import find_address
from ..hubs.tls import build_context, read_common_name
from .authorizer import find_missing_guard

CONNECT_TIMEOUT_S = 5.0
Verdict = Literal["PASS", "WARN", "FAIL"]
"""Verdict of a check before a job."""


def check_hub_role(kit: Path, name: str, hubs: dict[str, HubRules]) -> tuple[Verdict, str]:
    """Return verdict and detail of a participant's part in a job with hubs.

    Args:
        kit: its startup kit.
        name: its name.
        hubs: rules of each hub of the job.

    Raises:
        ConfigError: an address or a certificate is missing or malformed.
    """
    if name in hubs:
        return _check_hub(kit, name, hubs[name])
    own = [hub for hub, rules in hubs.items() if name in rules.sites]
    if not own:
        return "PASS", f"no hub of the job lists {name}: it reaches the server directly"
    return _check_site_of_hub(kit, own[0])


def _check_hub(kit: Path, name: str, rules: HubRules) -> tuple[Verdict, str]:
    host, port = find_address(kit / "local", name)
    build_context(kit / "startup")
    if not find_missing_guard(kit / "local"):
        return "FAIL", "a hub's guards would keep back the sums; remove the policy from this kit, which has no data"
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "WARN", f"{host}:{port} is in use, by a running job or by another program; a job waits 20 s for it"
        return "FAIL", f"{host}:{port}: {error.strerror or error}; set an address of this host"
    sites = ", ".join(rules.sites)
    return "PASS", f"hub of {len(rules.sites)} sites, without data; open port {port} for connections of {sites}"


def _check_site_of_hub(kit: Path, hub: str) -> tuple[Verdict, str]:
    host, port = find_address(kit / "local", hub)
    context, address = build_context(kit / "startup"), f"{hub} at {host}:{port}"
    try:
        with (
            socket.create_connection((host, port), CONNECT_TIMEOUT_S) as plain,
            context.wrap_socket(plain) as secured,
        ):
            other = read_common_name(secured)
    except ConnectionRefusedError:
        return "PASS", f"{address} does not listen now, as between jobs; its certificate is checked in a job"
    except ssl.SSLError as error:
        return "FAIL", f"{address} refuses the TLS handshake: {error.reason}. Is this the kit of this project?"
    except TimeoutError:
        return "WARN", f"{address} does not answer; allow outgoing TCP connections to it"
    except OSError as error:
        return "FAIL", f"{address} cannot be reached: {error}; correct its address"
    if other != hub:
        return "FAIL", f"{address}: the other end is {other}; correct its address"
    return "PASS", f"{address} answers with its certificate"
