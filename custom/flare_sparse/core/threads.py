"""Work that goes on beside other work."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def run_beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run ``work`` in a thread while the block runs, and wait for its end; the event it gets is set with the block."""
    has_ended = threading.Event()
    thread = threading.Thread(target=work, args=(has_ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
