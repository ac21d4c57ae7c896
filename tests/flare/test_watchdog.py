"""The simulator's processes end with the command that started them."""

from __future__ import annotations

import os
import subprocess
import sys

from flare_sparse.flare.watchdog import COMMAND_VARIABLE, EXIT_CODE, identify_command, is_running, watch_command

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def identify(pid: int) -> str:
    code = f"import psutil; print({pid}, psutil.Process({pid}).create_time())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_process_ends_when_its_command_is_killed() -> None:
    with subprocess.Popen(SLEEP) as command:
        code = "from flare_sparse.flare.watchdog import watch_command as w; import time; w(); time.sleep(60)"
        environment = {**os.environ, COMMAND_VARIABLE: identify(command.pid)}
        with subprocess.Popen([sys.executable, "-c", code], env=environment) as watcher:
            # Killed and not yet waited for, the command is a zombie: it counts as gone all the same.
            command.kill()
            assert watcher.wait(timeout=40) == EXIT_CODE


def test_command_is_told_from_a_later_process_with_its_id() -> None:
    assert is_running(identify_command())
    assert not is_running(f"{os.getpid()} 1.0")
    assert not is_running(f"{2**22 + 1} 1.0")


def test_nothing_is_watched_outside_the_simulator() -> None:
    assert watch_command({}) is None
