"""Types and ranges of the networks' settings, and the error for inputs that are too small.

Configurations are validated against a builder's annotations.

Blocks with the structure and the names of MONAI's, so that the weights of one fit the other.

They are built from torch alone: importing MONAI takes seconds and 300 MB in each process.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

from ...core.errors import ConfigError, format_shape

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Features = Annotated[int, Field(ge=1, le=10_000_000)]
Side = Annotated[int, Field(ge=1, le=4096)]
Share = Annotated[float, Field(ge=0, lt=1)]
Bins = Annotated[int, Field(ge=1, le=256)]
Gain = Annotated[float, Field(gt=0, le=1)]
Channels = Annotated[tuple[Count, ...], Field(min_length=1)]
Units = tuple[Count, ...]
Volume = tuple[Side, Side, Side]
Image = tuple[Side, Side, Side]

SizeFunction = Callable[[int], int]
"""Size of the last feature map along one axis, as a function of the size of the input."""


def count_windows(size: int, kernel: int, stride: int = 1) -> int:
    """Return the number of positions of an unpadded window along an axis of ``size``; 0 if it does not fit.

    >>> count_windows(121, kernel=5, stride=2), count_windows(2, kernel=3)
    (59, 0)
    """
    return (size - kernel) // stride + 1 if size >= kernel else 0


def compute_feature_map_shape(
    name: str, shape: Sequence[int], compute_size: SizeFunction, *, at_least: int = 1, rule: str = ""
) -> tuple[int, ...]:
    """Return the shape of a network's last feature map.

    Args:
        name: name of the network, for the error.
        shape: shape of the input, without channels.
        compute_size: size of the map along one axis.
        at_least: fewest elements that the map must have; 2 if an instance normalisation reads it.
        rule: what the shape must be, for the error; empty: it names the shape of the map.

    Raises:
        ConfigError: the input does not fit; the message names the smallest input of at least its size that works.
    """
    last = tuple(compute_size(size) for size in shape)
    if min(last) >= 1 and prod(last) >= at_least:
        return last
    smallest = [next(size for size in count(start) if compute_size(size) >= 1) for start in shape]
    if prod(map(compute_size, smallest)) < at_least:
        smallest[-1] = next(size for size in count(smallest[-1]) if compute_size(size) >= at_least)
    given, found, fit = (format_shape(sizes) for sizes in (shape, last, smallest))
    raise ConfigError(
        f"model {name!r}: input {given} does not fit, {rule or f'its last feature map would be {found}'}; the smallest "
        f"that works is {fit}. Use larger images or another task.patch, or choose a smaller model."
    )


def build_convolution_block(
    convolution: nn.Module, norm: nn.Module | None = None, *, activate: bool = True
) -> nn.Sequential:
    """Build a convolution, a normalisation and ReLU, as ``monai.networks.blocks.Convolution`` does.

    Args:
        convolution: the convolution.
        norm: the normalisation of its output channels; None: none.
        activate: whether ReLU follows.
    """
    return _name(conv=convolution, adn=_name(N=norm, A=nn.ReLU() if activate else None))


def build_fully_connected(inputs: int, outputs: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    """Build linear layers with dropout and ReLU between them, as ``monai.networks.nets.FullyConnectedNet`` does.

    Args:
        inputs: numbers per example, which may have any shape.
        outputs: outputs of the last layer.
        hidden: units of each hidden layer.
        dropout: dropout rate after each hidden layer.
    """
    layers, size = {}, inputs
    for number, units in enumerate(hidden):
        after = _name(D=nn.Dropout(dropout) if dropout else None, A=nn.ReLU())
        layers[f"hidden_{number}"] = nn.Sequential(nn.Linear(size, units), after)
        size = units
    return _name(flatten=nn.Flatten(), **layers, output=nn.Linear(size, outputs))


def _name(**parts: nn.Module | None) -> nn.Sequential:
    """Return the parts in sequence under their names, without those that are None."""
    return nn.Sequential(OrderedDict((name, part) for name, part in parts.items() if part is not None))
