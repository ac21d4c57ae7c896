"""The memory that operations of torch hold at most, on any device."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the storages that the operations in its block allocate, whatever the device and its allocator.

    Attributes:
        peak: largest number of bytes that were allocated at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        # torch keeps one Python object for a storage as long as the storage lives: its end is that of the memory.
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def release(_: Any) -> None:
            del self._storages[key]
            self._now -= size

        self._storages[key] = weakref.ref(storage, release)
        self._now += size
        self.peak = max(self.peak, self._now)
