"""Run a POC federation with FLARE's ``nvflare poc``: server and sites as processes on this machine, with mTLS."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from ...core.errors import ConfigError
from ...tasks.data.source import LOCAL_FILE, format_site_file
from ...tasks.task import SiteData
from ..checkpoints import CHECKPOINTS_VARIABLE, OFF
from ..site.setup import allow_classes
from ..watchdog import end_processes
from .connection import JobFailed
from .simulator import resolve_folder

PORTS = (8002, 8003)
START_TIMEOUT_S = 90
COMMAND_TIMEOUT_S = 180.0
"""Seconds that a command of FLARE may take; of its own, start has 90 for each of server and sites."""


@contextmanager
def start_poc(
    workspace: Path, sites: Mapping[str, SiteData], checkpoints: Path, also: Sequence[str] = ()
) -> Iterator[Path]:
    """Prepare and start a POC federation, and stop it at the end of the block.

    Each site is prepared as its IT department would: the package's classes are allowed, and a site file names the data.

    Args:
        workspace: folder of the federation; an older one is replaced.
        sites: data of each site, by name.
        checkpoints: folder of the checkpoints; outside the workspace, which is removed before the next run.
        also: further class paths that the sites allow, such as that of a user task.

    Yields:
        The startup kit of an admin who may submit jobs.

    Raises:
        ConfigError: FLARE's ports are in use, or the path contains a space.
        JobFailed: the federation did not start.
    """
    workspace = resolve_folder(workspace)
    if busy := [port for port in PORTS if _is_port_in_use(port)]:
        raise ConfigError(f"port {busy[0]} is in use, probably by another FLARE server. Stop it: nvflare poc stop")
    _run_poc_command(workspace, "prepare", "--force", "-c", *sites)
    kits = {startup.parent.name: startup.parent for startup in sorted(workspace.glob("*/prod_*/*/startup"))}
    admins = [kit for kit in kits.values() if (kit / "startup" / "fed_admin.json").is_file()]
    if not admins:
        raise JobFailed(f"nvflare poc prepare created no admin, only {', '.join(kits) or 'an empty folder'}")
    for kit in kits.values():
        # Admins build no components and have no allow-list.
        if kit not in admins:
            allow_classes(kit, also)
    for name, data in sites.items():
        (kits[name] / "local" / LOCAL_FILE).write_text(format_site_file(data), encoding="utf-8")
    try:
        _run_poc_command(workspace, "start", "--timeout", str(START_TIMEOUT_S), checkpoints=checkpoints)
        yield admins[0]
    finally:
        # Stop also after a failed start: some of the processes may run. The command fails if none does.
        _run_poc_command(workspace, "stop", check=False)


def _run_poc_command(
    workspace: Path, command: str, *options: str, check: bool = True, checkpoints: Path | None = None
) -> None:
    environment = {
        **os.environ,
        # nvflare writes this federation's admin into ~/.nvflare as the default of the user's own nvflare commands.
        "HOME": str(workspace),
        CHECKPOINTS_VARIABLE: str(checkpoints or OFF),
        "NVFLARE_POC_WORKSPACE": str(workspace),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    line = [sys.executable, "-m", "nvflare.cli", "poc", command, *options]
    # Print to files: a server that FLARE has started holds its ends of pipes open, so that they would never end.
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(  # noqa: S603
            line, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, text=True
        )
        try:
            code = process.wait(COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            started = psutil.Process(process.pid)
            end_processes([started, *started.children(recursive=True)])
            process.wait()
            code = None
        printed.seek(0)
        output = printed.read().strip().splitlines()[-6:]
    if check and code != 0:
        end = f"did not end within {COMMAND_TIMEOUT_S:.0f} s" if code is None else f"failed with exit code {code}"
        raise JobFailed("\n  ".join([f"nvflare poc {command} {end}:", *output]))


def _is_port_in_use(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(0.5)
        return client.connect_ex(("localhost", port)) == 0
