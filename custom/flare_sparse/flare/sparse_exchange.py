"""The former place of :class:`~flare_sparse.components.sparse_exchange.SparseExchange`, for jobs that name it."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    from ..components import sparse_exchange

    if name != "SparseExchange":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "flare_sparse.flare.sparse_exchange.SparseExchange is deprecated; name "
        "flare_sparse.components.sparse_exchange.SparseExchange",
        DeprecationWarning,
        stacklevel=2,
    )
    return sparse_exchange.SparseExchange
