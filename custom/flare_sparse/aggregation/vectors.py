"""Memory of large vectors that is used again."""

from __future__ import annotations

import weakref
from threading import Lock

import numpy as np
import torch
from torch import Tensor

MIN_REUSED_ENTRIES = 1 << 18
"""Smaller vectors come from memory that the process keeps anyway."""


class VectorPool:
    """Float32 vectors of zeros; the memory of one that nobody refers to any more is used for the next.

    The server makes a vector of the model in every round, and the system clears its pages one by one where they are
    first written: 200 ms at 30 M entries. To clear memory that the process has takes 10 ms.

    Args:
        kept: most vectors whose memory is kept: two, since a new model is made while the last one is in use.
    """

    def __init__(self, kept: int = 2):
        self._kept = kept
        self._memories: list[_Memory] = []
        self._lock = Lock()

    def take_zeros(self, size: int) -> Tensor:
        """Return a vector ``(size,)`` of zeros."""
        if size < MIN_REUSED_ENTRIES:
            return torch.zeros(size)
        with self._lock:
            unused = next((memory for memory in self._memories if memory.is_unused(size)), None)
            if unused is not None:
                return unused.lend()
            fresh = _Memory(size)
            self._memories = [*self._memories, fresh][-self._kept :]
            return fresh.lend()

    def clear(self) -> None:
        """Keep no memory any more; vectors in use are not affected."""
        with self._lock:
            self._memories = []


class _Memory:
    """Memory of one vector, and whether a tensor uses it."""

    def __init__(self, size: int):
        # torch would write every zero; numpy takes memory that the system clears, in large pages.
        self._array = np.zeros(size, np.float32)
        self._is_clear = True
        self._lent: weakref.ref[np.ndarray] | None = None

    def is_unused(self, size: int) -> bool:
        return self._array.size == size and (self._lent is None or self._lent() is None)

    def lend(self) -> Tensor:
        if not self._is_clear:
            self._array.fill(0)
        self._is_clear = False
        # The storage of a tensor and of all its views refers to this view of the array, and nothing else does.
        view = self._array.view()
        self._lent = weakref.ref(view)
        return torch.from_numpy(view)


POOL = VectorPool()
"""Memory of the models that the server sums."""
