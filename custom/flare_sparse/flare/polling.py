"""How idle sites ask FLARE's server for work: it holds a request until there is some, and sets the time to the next."""

import threading
import time
from typing import Any

SHARE = 0.05
"""Largest delay of a site's next request, as a share of the time since the current attempt began."""
LONGEST_S = 5.0
"""Longest interval between two requests."""
HOLD_S = 1.0
"""Longest time for which a request is held; far below FLARE's timeouts of a request."""
MOST_HELD = 16
"""Most requests that are held at a time: each takes one of the 100 threads that carry FLARE's messages."""


def compute_request_interval(elapsed_s: float, shortest_s: float) -> float:
    """Return the seconds after which a site without work polls again.

    A request costs about 7 kB in both directions. Twenty requests per second suit short rounds but would fill a slow
    link in long ones, so the interval grows in proportion: at most 20 requests in the first second of an attempt, 48 in
    the next 9, 47 in the next 90.

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
    """Holds requests of sites without work, and sets the interval after which they ask again.

    A request that finds no task waits for the next one: without that, a round would begin with a delay of the interval,
    and with one of half a second in FLARE's simulator, which pauses that long after an empty reply, whatever the
    interval. FLARE's ``ServerRunner`` can repeat its search for a task, too, but takes its lock for every try.

    FLARE reads ``task_request_interval`` from the job once, but its ``ServerRunner`` sends the configuration's current
    value with every empty reply, so that writing the value during the run takes effect.

    Args:
        runner: FLARE's ``ServerRunner``; its configuration and its search for a task are changed.
        shortest_s: shortest interval between two requests of a site.
    """

    def __init__(self, runner: Any, shortest_s: float):
        self._config = runner.config
        self._shortest_s, self._began = shortest_s, time.monotonic()
        self._places, self._condition = threading.BoundedSemaphore(MOST_HELD), threading.Condition()
        self._announced, self._is_closed = 0, False
        self._find_task = runner._try_to_get_task
        runner._try_to_get_task = self._await_task

    def restart(self) -> None:
        """Begin again at the shortest interval: an attempt starts, or its last reply has arrived."""
        self._began = time.monotonic()
        self.update()

    def update(self) -> None:
        """Lengthen the interval while the attempt lasts."""
        self._config.task_request_interval = compute_request_interval(time.monotonic() - self._began, self._shortest_s)

    def announce(self) -> None:
        """Let the held requests look for a task again; there is a new one."""
        with self._condition:
            self._announced += 1
            self._condition.notify_all()

    def close(self) -> None:
        """Hold no requests any more: the run is over, and a site must hear of it."""
        self._is_closed = True
        self.announce()

    def _await_task(self, client: Any, fl_ctx: Any) -> tuple[str, str, Any]:
        """Return name, id and data of the next task of a client; an empty name if there is none in ``HOLD_S``."""
        deadline = time.monotonic() + HOLD_S
        # Read before the search: a task that is announced during it is not missed.
        announced = self._announced
        task: tuple[str, str, Any] = self._find_task(client, fl_ctx)
        if task[0] or not self._places.acquire(blocking=False):
            return task
        try:
            while not task[0] and not self._is_closed and (remaining := deadline - time.monotonic()) > 0:
                with self._condition:
                    if self._announced == announced:
                        self._condition.wait(remaining)
                    announced = self._announced
                task = self._find_task(client, fl_ctx)
        finally:
            self._places.release()
        return task
