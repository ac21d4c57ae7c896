"""Standard CSR on the wire: arrays as ``scipy.sparse.csr_matrix((values, indices, indptr), shape)`` would hold them.

The entry point of papers that report CSR (NeuroSFL, FedSparsify). The encodings of ``SparseExchange`` are smaller.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import Tensor

from ..core.params import TensorSpec
from .arrays import MODELS, ComponentError, is_float
from .filters import ModelFilter, check_last

CSR_KIND = "flare_sparse_csr_of"
"""Key in a DXO's meta: the kind of the DXO before ``ToCSR``."""
_FLOATS = ("<f2", "<f4", "<f8")


class ToCSR(ModelFilter):
    """Replaces arrays by CSR where that is smaller; ``FromCSR`` at the other end undoes it, bit for bit but for -0.0.

    An array becomes ``{indptr, indices, values, shape, is_torch}``: int32, int32, floats of the array's type. Its first
    axis are the rows; scalars and vectors are one row. A -0.0 becomes 0.0, because ``delta * mask`` makes one of each
    negative entry that is off. The DXO becomes APP_DEFINED, so that no aggregator takes indices for weights.
    """

    is_strict = True

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        check_last(self, fl_ctx)
        data = {name: encode_csr(array) for name, array in dxo.data.items()}
        return DXO(DataKind.APP_DEFINED, data=data, meta={**dxo.meta, CSR_KIND: DataKind(dxo.data_kind).value})


@dataclass(eq=False)
class FromCSR(ModelFilter):
    """Undoes ``ToCSR``. Every table is checked before an array of the declared shape is allocated.

    Args:
        max_entries: largest number of entries of all tables of a message: few bytes may declare any shape.
    """

    max_entries: int = 2**28

    kinds = (DataKind.APP_DEFINED,)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        if not isinstance(dxo.meta, dict) or CSR_KIND not in dxo.meta:
            return None
        meta = dict(dxo.meta)
        kind = meta.pop(CSR_KIND)
        if kind not in MODELS or not isinstance(dxo.data, dict):
            raise _refuse("", f"the encoded kind is {str(kind)[:40]!r}")
        tables = {name: table for name, table in dxo.data.items() if isinstance(table, dict)}
        # Python's integers: the product of hostile sizes must not wrap around.
        total = sum(_read_shape(name, table).size for name, table in tables.items())
        if total > self.max_entries:
            raise ComponentError(
                self, f"a message declares {total} entries, max_entries is {self.max_entries}", "raise max_entries"
            )
        data = {name: decode_csr(name, table) if name in tables else table for name, table in dxo.data.items()}
        return DXO(kind, data=data, meta=meta)


def encode_csr(array: Any) -> Any:
    """Return an array of floats as a table, or itself where it is smaller or of another type."""
    is_torch = isinstance(array, Tensor)
    if not is_float(array) or array.dtype == torch.bfloat16:
        return array
    dense = array.detach().cpu().numpy() if is_torch else array
    if dense.dtype.newbyteorder("<").str not in _FLOATS:
        return array
    flat, shape = np.ascontiguousarray(dense).reshape(-1), tuple(dense.shape)
    rows, count = _count_rows(shape), int(np.count_nonzero(flat))
    # Row pointers and columns are int32.
    if flat.size >= 2**31 or 4 * (rows + 1 + count) + count * flat.itemsize >= flat.nbytes:
        return array
    grid = (flat != 0).reshape(rows, -1)
    return {
        "indptr": np.concatenate([[0], np.cumsum(grid.sum(1, dtype=np.int64))]).astype("<i4"),
        "indices": np.nonzero(grid)[1].astype("<i4"),
        "values": flat[flat != 0],
        "shape": list(shape),
        "is_torch": is_torch,
    }


def decode_csr(name: str, table: dict[str, Any]) -> Any:
    """Return the array of a table.

    Raises:
        ComponentError: the table is malformed.
    """
    spec = _read_shape(name, table)
    rows = _count_rows(spec.shape)
    width = spec.size // max(rows, 1)
    # int64: differences and offsets of hostile int32 numbers must not wrap around into the valid range.
    pointers, columns = table["indptr"].astype(np.int64), table["indices"].astype(np.int64)
    counts = np.diff(pointers)
    # Check this before the columns are expanded: the last pointer is their number.
    if pointers[0] != 0 or (counts < 0).any() or (counts > width).any() or pointers[-1] != columns.size:
        raise _refuse(name, f"row pointers are not 0, ascending by at most {width} up to {columns.size}")
    places = np.repeat(np.arange(rows, dtype=np.int64) * width, counts) + columns
    # Ascending places rule out duplicates and a second order of the same table.
    if ((columns < 0) | (columns >= width)).any() or (np.diff(places) <= 0).any():
        raise _refuse(name, f"columns of a row are not ascending in 0..{width - 1}")
    dense = np.zeros(spec.size, table["values"].dtype)
    dense[places] = table["values"]
    dense = dense.reshape(spec.shape)
    return torch.from_numpy(dense) if table["is_torch"] else dense


def _read_shape(name: str, table: dict[str, Any]) -> TensorSpec:
    """Return the declared shape of a table whose parts have the right types and lengths."""
    shape = table.get("shape")
    if set(table) != {"indptr", "indices", "values", "shape", "is_torch"} or type(table["is_torch"]) is not bool:
        raise _refuse(name, f"a table has {sorted(map(str, table))[:6]}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**31 for n in shape) or len(shape) > 32:
        raise _refuse(name, "shape is no list of sizes")
    for key, types in (("indptr", ("<i4",)), ("indices", ("<i4",)), ("values", _FLOATS)):
        part = table[key]
        # Compare the exact type: int64 indices would wrap around when cast.
        if not isinstance(part, np.ndarray) or part.ndim != 1 or part.dtype.str not in types:
            found = f"{getattr(part, 'dtype', type(part).__name__)} {getattr(part, 'shape', '')}"
            raise _refuse(name, f"{key} is {found}, expected one axis of {' or '.join(types)}")
    if table["indptr"].size != _count_rows(tuple(shape)) + 1 or table["values"].size != table["indices"].size:
        raise _refuse(
            name,
            f"{table['indptr'].size} row pointers, {table['indices'].size} indices and {table['values'].size} values "
            f"of the shape {shape[:6]}",
        )
    return TensorSpec(name, tuple(shape))


def _count_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 else 1


def _refuse(name: str, problem: str) -> ComponentError:
    where = f"{name[:80]}: " if name else ""
    return ComponentError("FromCSR", f"{where}{problem}", "put ToCSR last where the message leaves")
