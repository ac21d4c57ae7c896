"""Adapt the interval at which idle sites poll FLARE's server: it grows with the duration of an attempt."""

from __future__ import annotations

import time
from typing import Any

SHARE = 0.05
"""Largest delay of a site's next request, as a share of the time since the current attempt began."""
LONGEST_S = 5.0
"""Longest interval between two requests."""


def compute_request_interval(elapsed_s: float, shortest_s: float) -> float:
    """Return the seconds after which a site without work polls again.

    A request costs about 7 kB in both directions. Twenty requests per second suit short rounds but would fill a slow
    link in long ones, so the interval grows in proportion: 20 requests in the first second of an attempt, 48 in the
    next 9, 47 in the next 90.

    Args:
        elapsed_s: seconds since the attempt began.
        shortest_s: setting ``federation.request_interval_s``; used if it is longer.

    >>> [compute_request_interval(elapsed, 0.05) for elapsed in (0.0, 1.0, 20.0, 3600.0)]
    [0.05, 0.05, 1.0, 5.0]
    >>> compute_request_interval(3600.0, 10.0)
    10.0
    """
    return max(shortest_s, min(SHARE * elapsed_s, LONGEST_S))


class TaskPolling:
    """Sets the polling interval that FLARE's server sends to sites without work.

    FLARE reads ``task_request_interval`` from the job once, but its ``ServerRunner`` sends the configuration's current
    value with every empty reply, so that writing the value during the run takes effect.

    Args:
        runner: FLARE's ``ServerRunner``; its configuration is changed.
        shortest_s: shortest interval between two requests of a site.
    """

    def __init__(self, runner: Any, shortest_s: float):
        self._config = runner.config
        self._shortest_s, self._began = shortest_s, time.monotonic()

    def restart(self) -> None:
        """Begin again at the shortest interval: an attempt starts, or its last reply has arrived."""
        self._began = time.monotonic()
        self.update()

    def update(self) -> None:
        """Lengthen the interval while the attempt lasts."""
        self._config.task_request_interval = compute_request_interval(time.monotonic() - self._began, self._shortest_s)
