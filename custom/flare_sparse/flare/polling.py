"""How soon a site asks for work again: the sooner, the shorter it has waited."""

from __future__ import annotations

import time
from typing import Any

SHARE = 0.05
"""Of the time that a question has been out: what a site may be late for the next one."""
LONGEST_S = 5.0


def compute_request_interval(waited_s: float, shortest_s: float) -> float:
    """Seconds until a site that got no work asks again.

    A request costs some 7 kB both ways, so that twenty a second, which short rounds want, would fill a thin link in long
    ones. So often in proportion: 20 times in the first second of a question, 48 times in the next 9, 47 in the next 90.

    >>> [compute_request_interval(waited, 0.05) for waited in (0.0, 1.0, 20.0, 3600.0)]
    [0.05, 0.05, 1.0, 5.0]
    >>> compute_request_interval(3600.0, 10.0)  # who wants longer has it
    10.0
    """
    return max(shortest_s, min(SHARE * waited_s, LONGEST_S))


class TaskPolling:
    """Tells FLARE's server how long to send sites away for that ask for work while there is none.

    Args:
        runner: FLARE's ``ServerRunner``, whose configuration is written.
        shortest_s: between two requests of a site.
    """

    def __init__(self, runner: Any, shortest_s: float):
        self._config = runner.config
        self._shortest_s, self._began = shortest_s, time.monotonic()

    def begin(self) -> None:
        """A question goes out, or all answers are in and the next will soon."""
        self._began = time.monotonic()
        self.go_on()

    def go_on(self) -> None:
        """It is still out."""
        self._config.task_request_interval = compute_request_interval(time.monotonic() - self._began, self._shortest_s)
