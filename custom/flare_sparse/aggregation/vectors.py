"""Recycled memory for large vectors."""

from __future__ import annotations

import weakref
from threading import Lock

import numpy as np
import torch
from torch import Tensor

MIN_RECYCLED_ENTRIES = 1 << 18
"""The C library itself recycles the memory of smaller vectors."""


class VectorPool:
    """Creates float32 vectors of zeros and recycles the memory of those that are no longer referenced.

    The server creates a vector of the model in every round. The operating system clears new memory page by page on the
    first write: 200 ms for 30 M entries. Clearing recycled memory takes 10 ms.

    Args:
        kept: largest number of vectors whose memory is kept. Two are enough: the last model and the next one.
    """

    def __init__(self, kept: int = 2):
        self._kept = kept
        self._buffers: list[_Buffer] = []
        self._lock = Lock()

    def take_zeros(self, size: int) -> Tensor:
        """Return a vector ``(size,)`` of zeros."""
        if size < MIN_RECYCLED_ENTRIES:
            return torch.zeros(size)
        with self._lock:
            unused = next((buffer for buffer in self._buffers if buffer.is_unused(size)), None)
            if unused is not None:
                return unused.lend().zero_()
            new = _Buffer(size)
            self._buffers = [*self._buffers, new][-self._kept :]
            return new.lend()

    def clear(self) -> None:
        """Release all memory of the pool; vectors in use stay valid."""
        with self._lock:
            self._buffers = []


class _Buffer:
    """Memory of one vector, and whether a tensor uses it."""

    def __init__(self, size: int):
        # torch.zeros writes every zero; numpy leaves that to the operating system, which clears large pages at once.
        self._array = np.zeros(size, np.float32)
        self._lent: weakref.ref[np.ndarray] | None = None

    def is_unused(self, size: int) -> bool:
        return self._array.size == size and (self._lent is None or self._lent() is None)

    def lend(self) -> Tensor:
        """Return a tensor of this memory, whose values are those of the last use."""
        # Only the storage that the tensor shares with its views references this view of the array. When the last of
        # them is deleted, the weak reference is dead.
        view = self._array.view()
        self._lent = weakref.ref(view)
        return torch.from_numpy(view)


POOL = VectorPool()
"""Memory of the server's sums."""
