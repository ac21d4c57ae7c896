"""Nodes of a channel graph: the values of a forward pass, by the operation that computes them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """One feature map or vector of hidden units in a forward pass.

    Attributes:
        node: name in the traced graph.
        inputs: indices of the values that it is computed from.
        channels: number of channels; 0 for the network's input, whose channels are not distinguished
            (docs/algorithms.md, section 3.4).
    """

    node: str
    inputs: tuple[int, ...]
    channels: int


@dataclass(frozen=True)
class InputNode(Value):
    """The network's input."""


@dataclass(frozen=True)
class Passthrough(Value):
    """A value whose channel ``i`` depends on its input's channel ``i`` alone: pooling, activation, dropout, flattening.

    Attributes:
        rectified: whether it is the output of a ReLU.
    """

    rectified: bool = False


@dataclass(frozen=True)
class NormNode(Passthrough):
    """A normalisation.

    Attributes:
        module: path of the module; it may have a weight, a bias and running statistics, each with one number per
            channel.
        by_channel: whether it normalises every channel by itself (batch and instance normalisation do, group and
            layer normalisation do not).
    """

    module: str = ""
    by_channel: bool = True


@dataclass(frozen=True)
class Weighted(Value):
    """A linear layer or convolution: output channel ``j`` depends on the input channels of its group.

    Attributes:
        module: path of the module; its weight has shape ``(channels, ...)``.
        groups: number of groups of a convolution.
    """

    module: str = ""
    groups: int = 1


@dataclass(frozen=True)
class Sum(Value):
    """Channel-wise sum of several values: a residual connection."""


@dataclass(frozen=True)
class Concat(Value):
    """Concatenation of several values along the channels."""


@dataclass(frozen=True)
class Pad(Value):
    """A value padded with zero channels.

    Attributes:
        before: number of zero channels before the value's own.
    """

    before: int = 0
