"""Row pointers and column indices as in scipy.sparse: the format of the papers, for interoperability."""

from __future__ import annotations

import numpy as np
import torch

from ...core.errors import RejectedMessage
from ...core.mask import Mask
from ...core.params import Layout, TensorSpec
from .encoding import Encoding


class Csr(Encoding):
    """Any selection, 4 bytes per selected entry; used for very sparse ones.

    Section: the row pointers of each tensor (``rows + 1`` int32), then the column indices of each tensor (int32).
    """

    name, code = "csr", 5

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        # Row pointers and columns are int32.
        if any(tensor.size >= 2**31 for tensor in layout.tensors):
            return None
        return 4 * (mask.count + _count_pointers(layout))

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes:
        pointers, columns = [], []
        for tensor, start in zip(layout.tensors, layout.offsets, strict=False):
            grid = mask.bits[start : start + tensor.size].numpy().reshape(_get_matrix_shape(tensor))
            pointers.append(np.concatenate([[0], np.cumsum(grid.sum(1, dtype=np.int64))]))
            columns.append(np.nonzero(grid)[1])
        return np.concatenate([*pointers, *columns]).astype("<i4").tobytes()

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        num_pointers = _count_pointers(layout)
        least, most = 4 * num_pointers, 4 * (num_pointers + layout.size)
        # Widened below, the section takes three times its length in memory.
        if section.size % 4 or not least <= section.size <= most:
            raise RejectedMessage("E_LEN", "selection", f"int32, {least} to {most} bytes", section.size)
        # int64: differences and offsets of hostile int32 numbers must not wrap around into the valid range.
        numbers = np.frombuffer(section.tobytes(), "<i4").astype(np.int64)
        pointers, columns = numbers[:num_pointers], numbers[num_pointers:]
        bits = np.zeros(layout.size, dtype=bool)
        for tensor, start in zip(layout.tensors, layout.offsets, strict=False):
            rows, width = _get_matrix_shape(tensor)
            row_pointers, pointers = pointers[: rows + 1], pointers[rows + 1 :]
            counts = np.diff(row_pointers)
            if row_pointers[0] != 0 or (counts < 0).any() or (counts > width).any():
                expected = f"0, ascending by at most {width}"
                raise RejectedMessage("E_INDEX", f"row pointers of {tensor.name}", expected, "others")
            # Before the columns are expanded: the last pointer is the number of columns to read.
            if row_pointers[-1] > columns.size:
                raise RejectedMessage("E_LEN", f"columns of {tensor.name}", int(row_pointers[-1]), columns.size)
            tensor_columns, columns = columns[: row_pointers[-1]], columns[row_pointers[-1] :]
            flat = np.repeat(np.arange(rows, dtype=np.int64) * width, counts) + tensor_columns
            # Ascending flat positions rule out duplicates and a second order of the same selection.
            if ((tensor_columns < 0) | (tensor_columns >= width)).any() or (np.diff(flat) <= 0).any():
                expected = f"ascending in 0..{width - 1}"
                raise RejectedMessage("E_INDEX", f"columns of {tensor.name}", expected, "others")
            bits[start + flat] = True
        if columns.size:
            raise RejectedMessage("E_LEN", "selection", "no trailing bytes", 4 * columns.size)
        return Mask(torch.from_numpy(bits))


def _get_matrix_shape(tensor: TensorSpec) -> tuple[int, int]:
    """Return the tensor's shape as (first axis, rest); scalars and vectors are one row."""
    if len(tensor.shape) < 2:
        return 1, tensor.size
    return tensor.shape[0], tensor.size // max(tensor.shape[0], 1)


def _count_pointers(layout: Layout) -> int:
    """Return the number of row pointers of all tensors."""
    return sum(_get_matrix_shape(tensor)[0] + 1 for tensor in layout.tensors)
