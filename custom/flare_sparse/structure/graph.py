"""The channel graph of a network, read from its code by ``torch.fx`` without running it.

SCBF speaks of a stack of dense layers. Here the layers are a directed acyclic graph (convolutions, pooling, residual
sums, concatenations), so a *channel* is any path from the input to the output (ALGORITHMS 2.7).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import fx, nn

from ..params import Layout
from .nodes import Value, Weighted
from .tracing import Reader, Untraceable


@dataclass(frozen=True)
class ChannelGraph:
    """Values in the order in which a forward pass makes them.

    Attributes:
        values: each names the earlier ones that it is made of.
        output: position of the network's result.
    """

    values: tuple[Value, ...]
    output: int

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Positions of the weighted layers."""
        return tuple(at for at, value in enumerate(self.values) if isinstance(value, Weighted))

    def reads_input(self, at: int) -> bool:
        """Whether layer ``at`` reads the network's input, whose channels are not told apart."""
        return self.values[self.values[at].inputs[0]].channels == 0

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each value the positions of those that are made of it."""
        made_of_it: list[list[int]] = [[] for _ in self.values]
        for later, value in enumerate(self.values):
            for at in dict.fromkeys(value.inputs):
                made_of_it[at].append(later)
        return tuple(map(tuple, made_of_it))


def build_channel_graph(layout: Layout) -> ChannelGraph:
    """The channel graph of the network that a layout was made of.

    Raises:
        Untraceable: the layout has no network, or its code does something that the graph has no word for; the message
            names the place.
    """
    if layout.skeleton is None:
        raise Untraceable("the layout was not made of a network, so nothing is known of its connections")
    return trace_network(layout.skeleton)


def trace_network(module: nn.Module) -> ChannelGraph:
    """The channel graph of a module (its weights are not looked at).

    Raises:
        Untraceable: as :func:`build_channel_graph`.
    """
    reader = Reader(module)
    for node in trace(module).nodes:
        if node.op == "output":
            return ChannelGraph(tuple(reader.values), reader.position(node.args[0]))
        reader.read(node)
    raise Untraceable(f"{type(module).__name__} has no output")


def trace(module: nn.Module) -> fx.Graph:
    """The operations of a forward pass; the names of its nodes depend on the code alone.

    Raises:
        Untraceable: its code depends on the data it is given.
    """
    try:
        return fx.Tracer().trace(module)
    except Exception as error:  # a network's own code may fail in any way on the tracer's stand-ins
        raise Untraceable(f"{type(module).__name__} cannot be traced: {error}") from error
