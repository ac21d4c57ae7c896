"""When sparse kernels are faster than dense ones: a model of both times, the same on every machine.

A timed trial would choose by the load of the machine, and the choice decides the last bits of a result. The constants
are nanoseconds on one core of a server with AVX-512, fitted to the layers of five networks at densities from 1 to 100 %
(``benchmarks/performance/kernels.py`` has the networks); only their ratios matter. For these layers the choice is at
most 1.1 times slower in training, 1.3 times in inference, than dense computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .geometry import Geometry
from .loops import CHUNK


@dataclass(frozen=True)
class Work:
    """What a block computes for one minibatch.

    Attributes:
        geometry: sizes of the layer.
        live: number of its live weights.
        samples: size of the minibatch.
        is_normalised: whether an instance or batch normalisation follows.
        is_pooled: whether max-pooling follows.
        is_training: whether gradients are computed, too.
    """

    geometry: Geometry
    live: int
    samples: int
    is_normalised: bool = False
    is_pooled: bool = False
    is_training: bool = False


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of one operation each.

    Attributes:
        dense_call: start of torch's layers.
        dense_product: multiplication and addition of torch's convolution; in volumes, or else in images and signals.
        dense_output: value of the convolution's output.
        dense_norm: normalisation of a value of a volume.
        dense_pool: pooling of a value.
        sparse_call: preparation in Python.
        sparse_channel: start of the loop over a channel of an example.
        sparse_product: multiplication and addition of the kernels.
        sparse_slice: start of a loop over one live weight and up to ``CHUNK`` positions.
        sparse_norm: normalisation of a value.
        sparse_input: copy of an input value into the padded volume.
    """

    dense_call: float
    dense_product: tuple[float, float]
    dense_output: float
    dense_norm: float
    dense_pool: float
    sparse_call: float
    sparse_channel: float
    sparse_product: float
    sparse_slice: float
    sparse_norm: float
    sparse_input: float


INFERENCE = Costs(16_000, (0.0109, 0.0103), 1.05, 1.76, 4.30, 135_000, 553, 0.0287, 2.91, 0.94, 0.71)
TRAINING = Costs(102_000, (0.0326, 0.0264), 6.83, 2.78, 7.31, 394_000, 1_244, 0.1181, 9.95, 1.69, 1.55)


def is_sparse_faster(work: Work) -> bool:
    """Return whether the sparse kernels are expected to compute a block faster than torch."""
    costs = TRAINING if work.is_training else INFERENCE
    return estimate_sparse(work, costs) < estimate_dense(work, costs)


def estimate_dense(work: Work, costs: Costs) -> float:
    """Return the expected nanoseconds of torch's layers."""
    geometry = work.geometry
    is_volume = geometry.shape[0] > 1
    values = work.samples * geometry.outputs * prod(geometry.output_shape)
    product = costs.dense_product[0 if is_volume else 1]
    per_value = geometry.inputs * prod(geometry.kernel) * product + costs.dense_output
    per_value += costs.dense_norm * (work.is_normalised and is_volume) + costs.dense_pool * work.is_pooled
    return costs.dense_call + values * per_value


def estimate_sparse(work: Work, costs: Costs) -> float:
    """Return the expected nanoseconds of the sparse kernels."""
    geometry = work.geometry
    slices = -(-geometry.extent // CHUNK)
    products = work.live * (geometry.extent * costs.sparse_product + slices * costs.sparse_slice)
    norm = geometry.outputs * geometry.extent * costs.sparse_norm * work.is_normalised
    laid_out = geometry.inputs * geometry.phases * geometry.plane_size * costs.sparse_input
    per_sample = geometry.outputs * costs.sparse_channel + products + norm + laid_out
    return costs.sparse_call + work.samples * per_sample
