"""What a channel graph is made of: values, each with its channels, and what made them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """One feature map or vector of hidden units in a forward pass.

    Attributes:
        node: its name in the traced graph.
        inputs: positions in the graph of the values that it is made of.
        channels: how many; of the network's input 0, its channels are not told apart (ALGORITHMS 2.4 #1).
    """

    node: str
    inputs: tuple[int, ...]
    channels: int


@dataclass(frozen=True)
class Source(Value):
    """The network's input."""


@dataclass(frozen=True)
class Same(Value):
    """Channel ``i`` is made of channel ``i`` alone: pooling, activation, dropout, flattening.

    Attributes:
        rectified: it is the output of a ReLU.
    """

    rectified: bool = False


@dataclass(frozen=True)
class Norm(Same):
    """A normalisation.

    Attributes:
        module: its path; it may have a weight, a bias and running statistics, one number a channel each.
        by_channel: it treats every channel by itself (batch and instance normalisation, not group or layer).
    """

    module: str = ""
    by_channel: bool = True


@dataclass(frozen=True)
class Weighted(Value):
    """A linear layer or convolution: output channel ``j`` is made of the input channels of its group.

    Attributes:
        module: its path; the weight has shape ``(channels, ...)``.
        groups: of a convolution.
    """

    module: str = ""
    groups: int = 1


@dataclass(frozen=True)
class Sum(Value):
    """Equal channels of several values added up: a residual connection."""


@dataclass(frozen=True)
class Concat(Value):
    """The channels of several values one after another."""


@dataclass(frozen=True)
class Pad(Value):
    """The channels of a value with new, empty ones around them.

    Attributes:
        before: number of empty channels that come first.
    """

    before: int = 0
