"""Notice that a site's process in FLARE's simulator has died, which the simulator itself only logs."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ...core.threads import run_beside
from ..watchdog import end_processes

CHECK_S = 1.0
GRACE_S = 10.0
_DEATH = re.compile(rb"(?:Subprocess died for|Communication error with) client ([\w.@-]+?)(?=[,:\s])")
_NO_START = b"Failed to create connection to the child process"


@contextmanager
def watch_site_processes(log: Path, workspace: Path, grace_s: float = GRACE_S) -> Iterator[list[str]]:
    """End the simulation of a workspace when a site's process dies; otherwise the others wait for it to the timeout.

    Args:
        log: FLARE's log.
        workspace: FLARE's workspace, which the simulation's processes name in their command lines.
        grace_s: seconds in which the simulation may still end by itself.

    Yields:
        A list that receives what has died.
    """
    dead = list[str]()

    def watch(has_ended: threading.Event) -> None:
        position, is_last = 0, False
        while not is_last:
            # One more pass follows the end: the simulation may have ended because of what it logged last.
            is_last = has_ended.wait(CHECK_S)
            if log.is_file():
                with log.open("rb") as file:
                    file.seek(position)
                    text = file.read()
                # A line without its end is still being written: it is read again in the next pass.
                text = text[: text.rfind(b"\n") + 1]
                position += len(text)
                if found := _find_death(text):
                    dead.append(found)
                    if not has_ended.wait(grace_s):
                        end_processes(list_simulation(workspace))
                    return

    with run_beside(watch):
        yield dead


def list_simulation(workspace: Path) -> list[psutil.Process]:
    """Return the processes below this one whose command line names a workspace."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            # It has ended in the meantime.
            continue
        if any(word.startswith(str(workspace)) for word in words):
            found.append(process)
    return found


def _find_death(text: bytes) -> str:
    """Return whose process has died, from lines of FLARE's log; empty: none."""
    match = _DEATH.search(text)
    if match:
        return f"the process of {match[1].decode()} died"
    return "the process of a site did not start" if _NO_START in text else ""
