"""End the simulator's processes: when the command that started them is gone, or when the command says so."""

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

COMMAND_VARIABLE = "FLARE_SPARSE_COMMAND"
"""Names the process of the command to the processes that FLARE's simulator starts: its id and its start time."""

CHECK_S = 1.0
TERMINATION_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
EXIT_CODE = 143
"""As after SIGTERM."""


def identify_command() -> str:
    """Return the value of ``FLARE_SPARSE_COMMAND`` that names this process."""
    return f"{os.getpid()} {psutil.Process().create_time()}"


def is_running(command: str) -> bool:
    """Return whether the process that :func:`identify_command` named still runs."""
    pid, _, started = command.partition(" ")
    try:
        process = psutil.Process(int(pid))
        # The start time tells the process from a later one with the same id. A zombie has ended.
        return f"{process.create_time()}" == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def watch_command(environment: Mapping[str, str] = os.environ) -> threading.Thread | None:
    """End this process within seconds after the command that started it is gone; do nothing outside the simulator.

    FLARE's simulator runs in a session of its own, so that no signal to the command reaches it, and it would continue
    as an orphan that writes into the folder of the next run.

    Returns:
        The watching thread; None outside the simulator.
    """
    command = environment.get(COMMAND_VARIABLE)
    if not command:
        return None
    thread = threading.Thread(target=_exit_with, args=(command,), daemon=True, name="watch-command")
    thread.start()
    return thread


def _exit_with(command: str) -> None:
    while is_running(command):
        time.sleep(CHECK_S)
    # Not sys.exit(): from a thread it would end the thread alone, and a clean shutdown would wait for other sites.
    os._exit(EXIT_CODE)


def end_processes(processes: list[psutil.Process]) -> None:
    """End processes: SIGTERM, then SIGKILL for those that are left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            # It may have ended in the meantime.
            with suppress(psutil.Error):
                process.send_signal(number)
        _, processes = psutil.wait_procs(processes, timeout=TERMINATION_S)
