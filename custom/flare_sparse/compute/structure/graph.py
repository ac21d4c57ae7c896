"""Channel graph of a network, traced from its code by ``torch.fx`` without running it.

SCBF is defined for a stack of dense layers. Here the layers form a directed acyclic graph (convolutions, pooling,
residual sums, concatenations), and a *channel path* is any path from the input to the output (docs/algorithms.md,
section 3.4).
"""

from dataclasses import dataclass
from functools import cached_property

from torch import fx, nn

from ...core.params import Layout, LinearPath
from .nodes import Value, Weighted
from .tracing import SCALERS, GraphBuilder, Untraceable


@dataclass(frozen=True)
class ChannelGraph:
    """The values of a forward pass and how they are computed from each other.

    Attributes:
        values: the values, in the order in which a forward pass computes them.
        output: index of the network's output.
    """

    values: tuple[Value, ...]
    output: int

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Indices of the weighted layers."""
        return tuple(index for index, value in enumerate(self.values) if isinstance(value, Weighted))

    def is_input_layer(self, index: int) -> bool:
        """Return whether a layer reads the network's input, whose channels are not distinguished."""
        return self.values[self.values[index].inputs[0]].channels == 0

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each value the indices of the values computed from it."""
        consumers: list[list[int]] = [[] for _ in self.values]
        for index, value in enumerate(self.values):
            for source in dict.fromkeys(value.inputs):
                consumers[source].append(index)
        return tuple(map(tuple, consumers))


def build_channel_graph(layout: Layout) -> ChannelGraph:
    """Build the channel graph of the network that a layout describes.

    Raises:
        Untraceable: the layout has no network, or the network uses an operation that the graph does not support; the
            message names it.
    """
    if layout.skeleton is None:
        raise Untraceable("the layout was not built from a network, so its connections are unknown")
    return trace_network(layout.skeleton)


def trace_network(module: nn.Module) -> ChannelGraph:
    """Build the channel graph of a module; its weights are not read.

    Raises:
        Untraceable: as :func:`build_channel_graph`.
    """
    builder = GraphBuilder(module)
    for node in trace(module).nodes:
        if node.op == "output":
            return ChannelGraph(tuple(builder.values), builder.find_index(node.args[0]))
        builder.add_node(node)
    raise Untraceable(f"{type(module).__name__} has no output")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Traced into its operations, a scaler would be several values that no channel graph knows.
        return isinstance(m, (*SCALERS, LinearPath)) or super().is_leaf_module(m, module_qualified_name)


def trace(module: nn.Module) -> fx.Graph:
    """Trace the operations of a forward pass; node names depend on the network's code alone.

    Raises:
        Untraceable: the control flow of the network's code depends on its data.
    """
    try:
        return _Tracer().trace(module)
    # A network's own code may raise any exception when it receives the tracer's proxies.
    except Exception as error:
        raise Untraceable(f"{type(module).__name__} cannot be traced: {error}") from error
