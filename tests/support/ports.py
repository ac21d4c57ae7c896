"""Network ports that tests share: fixed ones are used by one test at a time, others are free."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from filelock import FileLock

FIRST_FREE_PORT = 20000
PORTS_OF_A_WORKER = 1000


def lock_ports(owner: str) -> FileLock:
    """Return the lock of the ports of ``poc`` (FLARE's POC mode: 8002, 8003) or ``provisioned`` (``poc/up``: 81xx).

    Processes of one machine share it: pytest's workers run test modules side by side, and a second server with the
    same ports does not start. A test that holds ``provisioned`` may ask for ``poc``, never the other way round.
    """
    return FileLock(Path(tempfile.gettempdir()) / f"flare-sparse-tests-{owner}.lock")


def find_processes_of(folder: Path) -> list[psutil.Process]:
    """Return every process whose command names a file in ``folder``, shells that start others again first."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.pid != os.getpid() and any(str(folder) in word for word in process.info["cmdline"] or ())
    ]
    # FLARE's sub_start.sh starts a killed server or site again.
    return sorted(found, key=lambda process: not any("sub_start" in word for word in process.info["cmdline"]))


def stop_processes_of(folder: Path) -> None:
    """Kill every process whose command names a file in ``folder``."""
    found = find_processes_of(folder)
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=30)


def find_free_ports(count: int) -> int:
    """Return the first of ``count`` neighbouring ports that are free.

    Each of pytest's workers searches from a number of its own: a server under test leaves its ports while it restarts,
    and another worker must not find them then.
    """
    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
    for first in range(FIRST_FREE_PORT + worker * PORTS_OF_A_WORKER, 60000, count):
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("localhost", port))
            return first
    raise OSError("no free ports")
