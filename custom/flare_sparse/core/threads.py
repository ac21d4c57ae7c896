"""Work that goes on beside other work."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context


@contextmanager
def run_beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``work`` in a thread while the block runs, and wait for its end; the event it gets is set with the block."""
    has_ended = threading.Event()
    # In a copy of the caller's context: a thread's own has no --json, for example.
    thread = threading.Thread(target=copy_context().run, args=(work, has_ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
