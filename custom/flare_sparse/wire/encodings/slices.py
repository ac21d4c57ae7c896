"""Indices of whole rows, whole columns, or whole tensors."""

from __future__ import annotations

import struct

import numpy as np
import torch

from ...errors import RejectedMessage
from ...mask import Mask
from ...params import Layout, TensorSpec
from .encoding import Encoding

_NONE, _ALL, _ROWS, _COLUMNS = range(4)


class Slices(Encoding):
    """Selections made of slices; serves LoRA-A2's ranks, SCBF's channels, and sets of whole tensors.

    Section: per tensor one byte: 0 none, 1 all, 2 rows (first axis), 3 columns (second axis); rows and columns are
    followed by their number (uint32, at least 1, fewer than all) and their indices (uint32, rising).
    """

    name, code = "slices", 6

    def min_bytes(self, on: Mask, known: Mask | None, layout: Layout) -> int | None:
        return len(layout.tensors)

    def encode(self, on: Mask, known: Mask | None, layout: Layout) -> bytes | None:
        parts = []
        for entry, start in zip(layout.tensors, layout.offsets, strict=False):
            part = _written(on.bits[start : start + entry.size].numpy(), entry)
            if part is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def decode(self, raw: np.ndarray, known: Mask | None, layout: Layout) -> Mask:
        data, at = raw.tobytes(), 0
        on = np.zeros(layout.size, dtype=bool)
        for entry, start in zip(layout.tensors, layout.offsets, strict=False):
            at = _read(data, at, entry, on[start : start + entry.size])
        if at != len(data):
            raise RejectedMessage("E_LEN", "selection", f"{at} bytes", len(data))
        return Mask(torch.from_numpy(on))


def _axes(entry: TensorSpec) -> dict[int, tuple[int, ...]]:
    """Mode to the shape (before, axis, after) in which that axis is the middle one."""
    shape = entry.shape
    axes: dict[int, tuple[int, ...]] = {}
    if shape and entry.size:
        axes[_ROWS] = (1, shape[0], entry.size // shape[0])
    if len(shape) > 1 and entry.size:
        axes[_COLUMNS] = (shape[0], shape[1], entry.size // (shape[0] * shape[1]))
    return axes


def _written(on: np.ndarray, entry: TensorSpec) -> bytes | None:
    if not on.any():
        return bytes([_NONE])
    if on.all():
        return bytes([_ALL])
    for mode, shape in _axes(entry).items():
        grid = on.reshape(shape)
        chosen = np.asarray(grid.any((0, 2)))
        if np.array_equal(grid, np.broadcast_to(chosen[None, :, None], shape)):
            indices = np.flatnonzero(chosen).astype("<u4")
            return struct.pack("<BI", mode, indices.size) + indices.tobytes()
    return None


def _read(data: bytes, at: int, entry: TensorSpec, on: np.ndarray) -> int:
    """Set the entry's part of the mask; returns where the next entry starts."""
    if at >= len(data):
        raise RejectedMessage("E_LEN", f"slices of {entry.name}", "a mode byte", "the end")
    mode, axes = int(data[at]), _axes(entry)
    if mode == _NONE:
        return at + 1
    if mode == _ALL and entry.size:
        on[:] = True
        return at + 1
    if mode not in axes:
        raise RejectedMessage("E_CANON", f"slices of {entry.name}", "a mode that this tensor has", mode)
    if at + 5 > len(data):
        raise RejectedMessage("E_LEN", f"slices of {entry.name}", "a count", "the end")
    count = int(struct.unpack_from("<I", data, at + 1)[0])
    width = axes[mode][1]
    if not 0 < count < width or at + 5 + 4 * count > len(data):
        raise RejectedMessage("E_LEN", f"slices of {entry.name}", f"1 to {width - 1} indices", count)
    indices = np.frombuffer(data, "<u4", count, at + 5).astype(np.int64)
    if indices[-1] >= width or (np.diff(indices) <= 0).any():
        raise RejectedMessage("E_INDEX", f"slices of {entry.name}", f"rising in 0..{width - 1}", "not")
    on.reshape(axes[mode])[:, indices] = True
    return at + 5 + 4 * count
