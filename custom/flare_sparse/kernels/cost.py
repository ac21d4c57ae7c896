"""When sparse kernels are faster than dense ones: a model of both times, the same on every machine."""

from __future__ import annotations

from math import prod

from .geometry import Geometry


def is_sparse_faster(geometry: Geometry, live: int) -> bool:
    """Return whether the sparse kernels are expected to be faster."""
    return live < 0.3 * geometry.inputs * geometry.outputs * prod(geometry.kernel)
