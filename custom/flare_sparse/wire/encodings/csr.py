"""Row pointers and column indices, as scipy.sparse lays them out: the papers' format, for interoperability."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import RejectedMessage
from ...mask import Mask
from ...params import Layout, TensorSpec
from .encoding import Encoding


def _matrix(entry: TensorSpec) -> tuple[int, int]:
    """A tensor as (out, rest); scalars and vectors are one row."""
    if len(entry.shape) < 2:
        return 1, entry.size
    return entry.shape[0], entry.size // max(entry.shape[0], 1)


class Csr(Encoding):
    """Any selection, 4 bytes per selected entry; serves very sparse ones.

    Section: for each tensor its row pointers (``rows + 1`` int32), then for each its column indices (int32).
    """

    name, code = "csr", 5

    def min_bytes(self, on: Mask, known: Mask | None, layout: Layout) -> int | None:
        if any(entry.size >= 2**31 for entry in layout.tensors):
            return None
        return 4 * (on.count + _pointers(layout))

    def encode(self, on: Mask, known: Mask | None, layout: Layout) -> bytes:
        pointers, columns = [], []
        for entry, start in zip(layout.tensors, layout.offsets, strict=False):
            grid = on.bits[start : start + entry.size].numpy().reshape(_matrix(entry))
            pointers.append(np.concatenate([[0], np.cumsum(grid.sum(1, dtype=np.int64))]))
            columns.append(np.nonzero(grid)[1])
        return np.concatenate([*pointers, *columns]).astype("<i4").tobytes()

    def decode(self, raw: np.ndarray, known: Mask | None, layout: Layout) -> Mask:
        head = _pointers(layout)
        if raw.size % 4 or raw.size < 4 * head:
            raise RejectedMessage("E_LEN", "selection", f"int32, at least {4 * head} bytes", raw.size)
        numbers = np.frombuffer(raw.tobytes(), "<i4").astype(np.int64)
        pointers, columns = numbers[:head], numbers[head:]
        on = np.zeros(layout.size, dtype=bool)
        for entry, start in zip(layout.tensors, layout.offsets, strict=False):
            rows, width = _matrix(entry)
            own, pointers = pointers[: rows + 1], pointers[rows + 1 :]
            counts = np.diff(own)
            if own[0] != 0 or (counts < 0).any() or (counts > width).any():
                raise RejectedMessage("E_INDEX", f"row pointers of {entry.name}", f"0, rising by up to {width}", "not")
            if own[-1] > columns.size:
                raise RejectedMessage("E_LEN", f"columns of {entry.name}", int(own[-1]), columns.size)
            taken, columns = columns[: own[-1]], columns[own[-1] :]
            flat = np.repeat(np.arange(rows, dtype=np.int64) * width, counts) + taken
            if ((taken < 0) | (taken >= width)).any() or (np.diff(flat) <= 0).any():
                raise RejectedMessage("E_INDEX", f"columns of {entry.name}", f"rising in 0..{width - 1}", "not")
            on[start + flat] = True
        if columns.size:
            raise RejectedMessage("E_LEN", "selection", "no trailing bytes", 4 * columns.size)
        return Mask(torch.from_numpy(on))


def _pointers(layout: Layout) -> int:
    return sum(_matrix(entry)[0] + 1 for entry in layout.tensors)
