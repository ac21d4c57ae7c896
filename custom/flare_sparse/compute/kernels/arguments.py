"""Arguments of the compiled loops. This module needs no numba, which is an optional dependency."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]


class Grid(NamedTuple):
    """Output positions of a convolution on the padded, flattened input.

    Attributes:
        depth: output planes.
        height: output rows of a plane.
        width: output positions of a row.
        plane: flat distance of two planes of the padded input.
        row: flat distance of two rows of the padded input.
    """

    depth: int
    height: int
    width: int
    plane: int
    row: int


class Window(NamedTuple):
    """Size of a pooling window, or of a pooled volume; the window (1, 1, 1) does not pool."""

    depth: int
    height: int
    width: int


class Weights(NamedTuple):
    """Live weights of a layer, ordered by the channel that they add to.

    Attributes:
        starts: int64 ``(channels + 1,)`` first live weight of each channel.
        offsets: int64 ``(live,)`` flat index, in the values read, of position 0 of the channel written.
        values: float32 ``(live,)``.
    """

    starts: Any
    offsets: Any
    values: Any


class Part(NamedTuple):
    """Samples and channels that one call computes: ``first <= sample < last`` and ``first <= channel < last``."""

    first_sample: int
    last_sample: int
    first_channel: int
    last_channel: int


class Norm(NamedTuple):
    """Per sample and channel, the affine map that the normalisation amounts to, and its derivative.

    The gradient of the convolution's output ``y`` is ``scales * g + constants + factors * y``, where ``g`` is the
    gradient of the pooled values at their positions, and 0 elsewhere.
    """

    scales: Any
    constants: Any
    factors: Any
