"""When sparse kernels are faster than dense ones: a model of both times, the same on every machine.

A timed trial would choose by the load of the machine, and the choice decides the last bits of a result. The constants
are nanoseconds on one and on two cores of servers with AVX-512, fitted to the layers of five networks, one of them of
images, at densities from 0.01 to 1; only their ratios matter. With one thread and with two, all layers together take
1 % longer than with the faster variant of each, and a sparse layer is at most 1.4 times slower than a dense one.
``benchmarks/performance/fit_kernel_costs.py`` fits them anew and checks that.
"""

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
        threads: number of torch's threads.
    """

    geometry: Geometry
    live: int
    samples: int
    is_normalised: bool = False
    is_pooled: bool = False
    is_training: bool = False
    threads: int = 1


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of one operation each, in the order of the operations that are counted."""

    dense: tuple[float, ...]
    sparse: tuple[float, ...]

    def is_sparse_faster(self, work: Work) -> bool:
        """Return whether the kernels are expected to compute a block faster than torch at these costs."""
        gain = 1 if work.threads == 1 else _LEAST_GAIN_WITH_THREADS
        sparse = _sum_products(self.sparse, count_sparse_operations(work))
        return gain * sparse < _sum_products(self.dense, count_dense_operations(work))


_LEAST_GAIN_WITH_THREADS = 1.2
"""How many times faster the kernels must be expected to be with several threads, where the model errs more.

A layer that is left dense by mistake takes as long as without the kernels.
"""


INFERENCE = Costs((20_300, 0.00922, 1.09, 1.21, 3.26), (136_000, 458, 0.0225, 0.0181, 1.98, 0.541, 0.842))
TRAINING = Costs((91_000, 0.0262, 5.13, 2.49, 3.55), (347_000, 990, 0.0693, 0.0771, 6.18, 1.12, 1.62))
TRAINING_THREADED = Costs((291_000, 0.0191, 4.85, 2.0, 6.34), (850_000, 1_280, 0.0667, 0.0695, 4.06, 1.35, 2.65))


_PRODUCTS_OF_A_STORED_VALUE = 64
"""Products that take as long as to write a value to memory and to read it again."""


def is_storing_faster(live: int, outputs: int) -> bool:
    """Return whether the output of a convolution is better kept for the backward pass than computed again.

    Args:
        live: number of live weights.
        outputs: number of output channels.
    """
    return live > _PRODUCTS_OF_A_STORED_VALUE * outputs


def is_sparse_faster(work: Work) -> bool:
    """Return whether the sparse kernels are expected to compute a block faster than torch."""
    return get_costs(is_training=work.is_training, threads=work.threads).is_sparse_faster(work)


def get_costs(*, is_training: bool, threads: int) -> Costs:
    """Return the costs of a training step or of an inference; those of two threads stand for any larger number.

    For inference, those of one thread choose as well as fitted ones.
    """
    if not is_training:
        return INFERENCE
    return TRAINING if threads == 1 else TRAINING_THREADED


def count_dense_operations(work: Work) -> tuple[int, ...]:
    """Return how often torch's layers do what takes their time.

    Returns:
        starts: of the layers.
        products: multiplications and additions.
        values: of the convolution's output.
        normalised: values that are normalised.
        pooled: values that are pooled.
    """
    geometry, starts = work.geometry, 1
    values = work.samples * geometry.outputs * prod(geometry.output_shape)
    products = values * geometry.inputs * prod(geometry.kernel)
    return starts, products, values, values * work.is_normalised, values * work.is_pooled


def count_sparse_operations(work: Work) -> tuple[int, ...]:
    """Return how often the kernels do what takes their time.

    Returns:
        starts: preparation in Python.
        channels: starts of the loop over a channel of an example.
        products: multiplications and additions.
        repeated: those that the backward pass repeats.
        slices: starts of a loop over one live weight and up to ``CHUNK`` positions.
        normalised: values that are normalised.
        inputs: values that are copied into the padded volume.
    """
    geometry, starts = work.geometry, 1
    channels = work.samples * geometry.outputs
    products = work.samples * work.live * geometry.extent
    repeated = products * (work.is_normalised and not is_storing_faster(work.live, geometry.outputs))
    slices = work.samples * work.live * -(-geometry.extent // CHUNK)
    normalised = channels * geometry.extent * work.is_normalised
    inputs = work.samples * geometry.inputs * geometry.phases * geometry.plane_size
    return starts, channels, products, repeated, slices, normalised, inputs


def _sum_products(costs: tuple[float, ...], counts: tuple[int, ...]) -> float:
    return sum(cost * count for cost, count in zip(costs, counts, strict=True))
