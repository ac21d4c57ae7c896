"""A federation of real processes on this machine, through FLARE's own ``nvflare poc``: mTLS, one workspace a site."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...data.source import LOCAL_FILE, site_file
from ...encryption import CLIENT_FILE
from ...errors import ConfigError
from ...task import SiteData
from ..checkpoints import CHECKPOINTS_VARIABLE, OFF
from ..site.allow_list import allow
from .simulator import JobFailed

PORTS = (8002, 8003)
START_TIMEOUT_S = 90


@contextmanager
def poc(
    workspace: Path,
    sites: Mapping[str, SiteData],
    checkpoints: Path,
    allowed: Sequence[str] = (),
    *,
    encrypted: bool = False,
) -> Iterator[Path]:
    """Prepare, start and in the end stop a POC federation.

    Each site gets what its IT would do by hand: the allow-list and a site file that says where its data lies.

    Args:
        workspace: is replaced.
        sites: by name.
        checkpoints: folder for them, beside the workspace, which does not outlive the run.
        allowed: class paths that the sites allow beside ours.
        encrypted: FLARE puts keys for encrypted sums into the kits.

    Yields:
        The startup kit of the admin who may submit jobs.

    Raises:
        ConfigError: FLARE's ports are in use, or a path has a space in it.
        JobFailed: the federation did not start.
    """
    if any(character.isspace() for character in str(workspace)):
        raise ConfigError(f"{str(workspace)!r} contains a space, which FLARE cannot handle; choose another --out")
    if busy := [port for port in PORTS if _in_use(port)]:
        raise ConfigError(f"port {busy[0]} is in use: another FLARE server runs here. Stop it: nvflare poc stop")
    _poc(workspace, "prepare", "--force", *(["--he"] if encrypted else []), "-c", *sites)
    kits = _kits(workspace)
    for kit in kits.values():
        if not (kit / "startup" / "fed_admin.json").is_file():
            allow(kit, allowed)
    for name, data in sites.items():
        (kits[name] / "local" / LOCAL_FILE).write_text(site_file(data), encoding="utf-8")
    try:
        _poc(workspace, "start", "--timeout", str(START_TIMEOUT_S), checkpoints=checkpoints)
        yield kits[_admin(kits)]
    finally:
        _poc(workspace, "stop", check=False)


def client_context(workspace: Path, site: str) -> bytes:
    """The keys in a site's kit of a federation that was prepared with them."""
    return (_kits(workspace)[site] / "startup" / CLIENT_FILE).read_bytes()


def _poc(workspace: Path, command: str, *options: str, check: bool = True, checkpoints: Path | None = None) -> None:
    environment = {
        **os.environ,
        # Otherwise this federation's admin becomes the default of the user's own nvflare commands.
        "HOME": str(workspace),
        CHECKPOINTS_VARIABLE: str(checkpoints or OFF),
        "NVFLARE_POC_WORKSPACE": str(workspace),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    line = [sys.executable, "-m", "nvflare.cli", "poc", command, *options]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if check and done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-6:]
        raise JobFailed("\n  ".join([f"nvflare poc {command} failed ({done.returncode}):", *said]))


def _kits(workspace: Path) -> dict[str, Path]:
    """The startup kits by participant."""
    return {kit.parent.name: kit.parent for kit in sorted(workspace.glob("*/prod_*/*/startup"))}


def _admin(kits: Mapping[str, Path]) -> str:
    for name, kit in kits.items():
        file = kit / "startup" / "fed_admin.json"
        if file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("admin"):
            return name
    raise JobFailed(f"nvflare poc prepare made no admin; found {', '.join(kits)}")


def _in_use(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.settimeout(0.5)
        return attempt.connect_ex(("localhost", port)) == 0
