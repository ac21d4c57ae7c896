"""When sparse kernels are faster than dense ones: a model of both times, the same on every machine.

A timed trial would choose by the load of the machine, and the choice decides the last bits of a result. The constants
are nanoseconds on one core of a server with AVX-512 (``benchmarks/performance/kernels.py``); only their ratios matter.
"""

from __future__ import annotations

from math import prod

from .geometry import Geometry
from .loops import CHUNK

DENSE_PRODUCT = 0.045
"""Multiplication and addition of torch's dense convolution."""
SPARSE_PRODUCT = 0.07
"""Multiplication and addition of the sparse kernels."""
SPARSE_SLICE = 12.0
"""Start of a loop over one live weight and up to ``CHUNK`` positions."""
SPARSE_OUTPUT = 1.5
"""Normalisation sums, pooling and activation of an output value: what they cost more than in torch."""
SPARSE_CALL = 300_000.0
"""Preparation of a layer in Python, once for a minibatch."""


def is_sparse_faster(geometry: Geometry, live: int, samples: int) -> bool:
    """Return whether the sparse kernels are expected to compute a layer faster than torch.

    Args:
        geometry: sizes of the layer.
        live: number of its live weights.
        samples: size of the minibatch.
    """
    taps = prod(geometry.kernel) * geometry.inputs
    dense = samples * geometry.outputs * prod(geometry.output_shape) * taps * DENSE_PRODUCT
    slices = -(-geometry.extent // CHUNK)
    per_sample = live * (geometry.extent * SPARSE_PRODUCT + slices * SPARSE_SLICE)
    sparse = SPARSE_CALL + samples * (per_sample + geometry.outputs * geometry.extent * SPARSE_OUTPUT)
    return sparse < dense
