"""What the user of ``flare-sparse run`` reads when a run stops: what happened, what is safe, and what to type."""

import errno
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import typer

from ..api.deployment import Env
from ..core.errors import CheckpointError, ConfigError, DiskFull, FlareSparseError, OutOfMemory, is_out_of_memory
from ..flare.watchdog import end_processes
from ..results.runs.folder import CHECKPOINTS, LEAST_FREE, RunFolder, describe_disk, measure_free
from .console import err

PATIENCE_S = 30.0
"""Seconds after Ctrl-C in which another Ctrl-C does not disturb the end of the run's processes."""


@dataclass
class RunProgress:
    """The command that the user typed, and the rounds as far as it has seen them.

    Attributes:
        config: configuration file.
        env: environment of the run.
        kit: startup kit; None: not given.
        overrides: values of ``--set``.
        out: result folder as the user typed it, or the default.
        replaces: whether the user has asked to replace the run of the folder.
        committed: last committed round; None: none was seen.
    """

    config: Path
    env: Env
    kit: Path | None
    overrides: Sequence[str]
    out: Path
    replaces: bool
    committed: int | None = None

    def format_command(self, start: str = "") -> str:
        """Return the command with a value of ``--start``, quoted for a shell."""
        options: list[tuple[str, str | Path | None]] = [("--env", None if self.env == "sim" else self.env)]
        options += [("--kit", self.kit), *(("--set", override) for override in self.overrides)]
        options += [("--out", self.out), ("--start", start)]
        given = (str(word) for name, value in options if value for word in (name, value))
        return shlex.join(["flare-sparse", "run", str(self.config), *given])

    @property
    def has_commit(self) -> bool:
        """Whether there may be a committed round, which is safe."""
        return self.env == "prod" or self.committed is not None or RunFolder(self.out).has_checkpoint

    def record(self, line: Mapping[str, Any]) -> None:
        """Note a round, a line of ``rounds.jsonl``."""
        self.committed = max(min(int(line["round"]), int(line["rounds"])), self.committed or 0)

    def describe_interruption(self, number: int) -> list[str]:
        """Return what happened, what is safe, and what to type after a signal ended the command."""
        cause = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self.env == "prod":
            happened = f"stopped by {cause}; the job itself continues at the server"
            return [happened, self._describe_safe(), f"follow it again: {self.format_command('last')}"]
        return [f"stopped by {cause}; the processes of the run are ended", *self.describe_next_steps(None)]

    def describe_next_steps(self, error: BaseException | None) -> list[str]:
        """Return what is safe and what to type.

        Args:
            error: why the run ended; None: the user ended it.
        """
        remedy = str(getattr(error, "remedy", ""))
        # What was to be replaced is still there if the run ended before it had anything of its own.
        keeps_older = self.replaces and self.env != "prod" and self.committed is None
        way = "to continue" if error is None else "to continue, once the cause is removed"
        start = ("new" if keeps_older else "last") if self.has_commit else ""
        return [
            *([f"remedy: {remedy}"] if remedy else []),
            self._describe_safe(),
            f"{way}: {self.format_command(start)}",
        ]

    def _describe_safe(self) -> str:
        where = "at the server" if self.env == "prod" else f"in {self.out / CHECKPOINTS}"
        if self.committed is not None:
            return f"safe: round {self.committed} is committed {where}"
        if self.has_commit:
            return f"safe: every round that was committed before, {where}"
        return "safe: no round was committed yet, so there is nothing to lose"


@contextmanager
def watch_signals() -> Iterator[dict[int, list[psutil.Process]]]:
    """Raise KeyboardInterrupt for the first SIGINT or SIGTERM in the block.

    Yields:
        Receives that signal, with the processes that the command had started when it arrived.
    """
    stopped: dict[int, list[psutil.Process]] = {}
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    first = 0.0

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if not stopped:
            # Listed now: a grandchild can no longer be found once FLARE has killed its parent.
            first, stopped[number] = time.monotonic(), psutil.Process().children(recursive=True)
            # Ending a POC federation takes half a minute.
            os.write(2, b"\nstopping ...\n")
        elif time.monotonic() - first < PATIENCE_S:
            return
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        yield stopped
    finally:
        # Do not restore the handlers of the start (__main__.py): they say that nothing was changed.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def explain_outcome(progress: RunProgress) -> Iterator[None]:
    """Turn an interruption or an error of a run into what happened, what is safe and what to type.

    Args:
        progress: progress of the run; the block records every round in it.

    Raises:
        typer.Exit: the run was interrupted: exit code 130 for Ctrl-C, 143 for SIGTERM.
        DiskFull, OutOfMemory: the run failed because its disk is full, or for lack of memory.
        FlareSparseError: the run's own error, with what is safe and what to type as notes.
    """
    with watch_signals() as stopped:
        try:
            yield
        # Catch any exception: a library whose import is interrupted may raise one of its own.
        except (KeyboardInterrupt, Exception) as error:
            if isinstance(error, KeyboardInterrupt) or stopped:
                number, processes = next(iter(stopped.items()), (signal.SIGINT, []))
                end_processes(processes)
                for line in progress.describe_interruption(number):
                    err.print(line)
                raise typer.Exit(128 + number) from None
            failure = find_full_disk(error, progress.out) or find_lack_of_memory(error) or error
            if isinstance(failure, (ConfigError, CheckpointError)):
                raise
            # An error before the first round, such as unreadable data, leaves nothing to continue.
            if progress.has_commit or isinstance(failure, OutOfMemory) or bool(getattr(failure, "remedy", "")):
                for note in progress.describe_next_steps(failure):
                    failure.add_note(note)
            if failure is error:
                raise
            raise failure from error


def find_full_disk(error: BaseException, out: Path) -> DiskFull | None:
    """Return the error of a full disk if it is what made a run fail.

    FLARE's processes report it in many ways, or not at all where the log is on the same disk, so an almost full disk
    counts as the cause of any failure.
    """
    cause: BaseException | None = error
    is_full = False
    while cause is not None and not is_full:
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        is_full = is_full or os.strerror(errno.ENOSPC) in str(cause)
        cause = cause.__cause__ or cause.__context__
    free = measure_free(out)
    if not is_full and (free is None or free >= LEAST_FREE // 10):
        return None
    return DiskFull(describe_disk(out, free))


def find_lack_of_memory(error: BaseException) -> OutOfMemory | None:
    """Return the error of a process that got no more memory, if that made a run fail."""
    if isinstance(error, FlareSparseError) or not is_out_of_memory(error):
        return None
    return OutOfMemory(f"memory ran out: {str(error) or type(error).__name__}")
