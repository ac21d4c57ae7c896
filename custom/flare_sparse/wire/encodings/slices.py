"""Indices of whole rows, whole columns or whole tensors."""

import struct

import numpy as np
import torch

from ...core.errors import RejectedMessage
from ...core.mask import Mask
from ...core.params import Layout, TensorSpec
from .encoding import Encoding

_NONE, _ALL, _ROWS, _COLUMNS = range(4)
_MODE_AND_COUNT = struct.Struct("<BI")


class Slices(Encoding):
    """Selections that consist of slices. Used for LoRA-A2's ranks, SCBF's channels, and sets of whole tensors.

    Section: one byte per tensor: 0 none, 1 all, 2 rows (first axis), 3 columns (second axis). Rows and columns are
    followed by their number (uint32, at least 1, fewer than all) and their indices (uint32, ascending).
    """

    name, code = "slices", 6

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        return len(layout.tensors)

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes | None:
        parts = []
        for tensor, start in zip(layout.tensors, layout.offsets, strict=False):
            part = _encode_tensor(mask.bits[start : start + tensor.size].numpy(), tensor)
            if part is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        data, offset = section.tobytes(), 0
        bits = np.zeros(layout.size, dtype=bool)
        for tensor, start in zip(layout.tensors, layout.offsets, strict=False):
            offset = _decode_tensor(data, offset, tensor, bits[start : start + tensor.size])
        if offset != len(data):
            raise RejectedMessage("E_LEN", "selection", f"{offset} bytes", len(data))
        return Mask(torch.from_numpy(bits))


def _get_sliced_shapes(tensor: TensorSpec) -> dict[int, tuple[int, ...]]:
    """Return, for each mode that the tensor has, its shape as (before, axis, after) with the sliced axis second."""
    shape = tensor.shape
    shapes: dict[int, tuple[int, ...]] = {}
    if shape and tensor.size:
        shapes[_ROWS] = (1, shape[0], tensor.size // shape[0])
    if len(shape) > 1 and tensor.size:
        shapes[_COLUMNS] = (shape[0], shape[1], tensor.size // (shape[0] * shape[1]))
    return shapes


def _encode_tensor(bits: np.ndarray, tensor: TensorSpec) -> bytes | None:
    """Return the tensor's part of the section; None if its selected entries do not form slices."""
    if not bits.any():
        return bytes([_NONE])
    if bits.all():
        return bytes([_ALL])
    for mode, shape in _get_sliced_shapes(tensor).items():
        grid = bits.reshape(shape)
        selected = np.asarray(grid.any((0, 2)))
        if np.array_equal(grid, np.broadcast_to(selected[None, :, None], shape)):
            indices = np.flatnonzero(selected).astype("<u4")
            return _MODE_AND_COUNT.pack(mode, indices.size) + indices.tobytes()
    return None


def _decode_tensor(data: bytes, offset: int, tensor: TensorSpec, bits: np.ndarray) -> int:
    """Set the tensor's part of the mask in place and return the offset of the next tensor's part."""
    field = f"slices of {tensor.name}"
    if offset >= len(data):
        raise RejectedMessage("E_LEN", field, "a mode byte", "the end")
    mode, shapes = int(data[offset]), _get_sliced_shapes(tensor)
    if mode == _NONE:
        return offset + 1
    # An empty tensor must have the mode "none", so that a selection has one valid form.
    if mode == _ALL and tensor.size:
        bits[:] = True
        return offset + 1
    if mode not in shapes:
        raise RejectedMessage("E_CANON", field, "a mode that this tensor has", mode)
    indices_start = offset + _MODE_AND_COUNT.size
    if indices_start > len(data):
        raise RejectedMessage("E_LEN", field, "a count", "the end")
    count = int(_MODE_AND_COUNT.unpack_from(data, offset)[1])
    num_slices = shapes[mode][1]
    # Checked before the indices are read, because the sender chose the count. No slice and all slices have own modes.
    if not 0 < count < num_slices or indices_start + 4 * count > len(data):
        raise RejectedMessage("E_LEN", field, f"1 to {num_slices - 1} indices", count)
    indices = np.frombuffer(data, "<u4", count, indices_start).astype(np.int64)
    if indices[-1] >= num_slices or (np.diff(indices) <= 0).any():
        raise RejectedMessage("E_INDEX", field, f"ascending in 0..{num_slices - 1}", "other indices")
    bits.reshape(shapes[mode])[:, indices] = True
    return indices_start + 4 * count
