"""The screen of a command, as the observer of a run."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rich.console import Console

from ..results.runs.progress import Printer
from .console import err, out


class Screen(Printer):
    """Prints a line for each round, problems with the data to standard error.

    Args:
        console: receives the lines.
    """

    def __init__(self, console: Console = out):
        super().__init__(partial(console.print, markup=False), partial(err.print, markup=False))
        self._console = console

    def wait(self, text: str) -> AbstractContextManager[Any]:
        return self._console.status(text)
