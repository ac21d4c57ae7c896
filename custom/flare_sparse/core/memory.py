"""Lack of memory, which the libraries report in many ways."""

import errno
import os

_TEXTS = (os.strerror(errno.ENOMEM), "can't allocate memory", "failed to map segment", "out of memory", "MemoryError")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception or one of its causes says that a process got no more memory."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or any(text in str(cause) for text in _TEXTS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
