"""Observation of hidden units while a network runs."""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, fx, nn

from .graph import trace


class ObservedNetwork(nn.Module):
    """A network that passes the results of some of its operations to a callback.

    Args:
        network: the network to run, with its own weights.
        nodes: names in its traced graph, such as :attr:`RemovableLayer.rectified`.
        callback: called with the name and the result of each of these nodes, in the order of the forward pass.

    Raises:
        Untraceable: the control flow of the network's code depends on its data.
    """

    def __init__(self, network: nn.Module, nodes: Collection[str], callback: Callable[[str, Tensor], None]):
        super().__init__()
        self._interpreter = _ObservingInterpreter(fx.GraphModule(network, trace(network)), nodes, callback)

    def forward(self, *inputs: Any) -> Any:
        """Return the network's output."""
        return self._interpreter.run(*inputs)


class _ObservingInterpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, nodes: Collection[str], callback: Callable[[str, Tensor], None]):
        super().__init__(module)
        self._nodes, self._callback = frozenset(nodes), callback

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self._nodes:
            self._callback(n.name, result)
        return result
