"""The command ``flare-sparse``: what a user reads when it stops before it has started anything.

Imports take time, so this module, and the package itself, import next to nothing before the handlers are set. A Ctrl-C
still earlier meets Python's own start, which ends with Python's traceback.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn


def main() -> None:
    """Run the command line."""
    is_run = sys.argv[1:2] == ["run"]
    if is_run:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop_at_start)
    try:
        from .cli import app

        app()
    except (MemoryError, ImportError, OSError, RuntimeError) as error:
        from .core.errors import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        _write("error E_MEMORY (docs/troubleshooting.md)", f"memory ran out: {str(error) or type(error).__name__}")
        _write(*(_describe_start() if is_run else [f"to repeat, with more memory: {_get_command()}"]))
        sys.exit(1)


def _stop_at_start(number: int, _frame: FrameType | None) -> NoReturn:
    """End the process: replaced as soon as the run has something to end or to lose."""
    cause = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    _write(f"\nstopped by {cause}; the run was not started yet", *_describe_start())
    # Not an exception: a library whose import it interrupts may swallow it, or raise another one.
    os._exit(128 + number)


def _describe_start() -> list[str]:
    """Return what is safe and what to type, in the words of a run that stops later (``cli/outcome.py``)."""
    return ["safe: every round that was committed before", f"to continue: {_get_command()}"]


def _get_command() -> str:
    import shlex

    return shlex.join(["flare-sparse", *sys.argv[1:]])


def _write(*lines: str) -> None:
    os.write(2, "".join(f"{line}\n" for line in lines).encode())


if __name__ == "__main__":
    main()
