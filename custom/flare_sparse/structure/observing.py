"""Looking at hidden units while a network runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, fx, nn

from .graph import trace


class ObservedNetwork(nn.Module):
    """Runs a network operation by operation and shows what some of them give.

    Args:
        network: is run as it is, on its own weights.
        nodes: names in its traced graph, such as :attr:`RemovableLayer.rectified`.
        see: called with the name and the result of each, in the order of the forward pass.

    Raises:
        Untraceable: the network's code depends on its data.
    """

    def __init__(self, network: nn.Module, nodes: Collection[str], see: Callable[[str, Tensor], None]):
        super().__init__()
        self._runner = _Runner(fx.GraphModule(network, trace(network)), nodes, see)

    def forward(self, *inputs: Any) -> Any:
        """As the network's own."""
        return self._runner.run(*inputs)


class _Runner(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, nodes: Collection[str], see: Callable[[str, Tensor], None]):
        super().__init__(module)
        self._nodes, self._see = frozenset(nodes), see

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self._nodes:
            self._see(n.name, result)
        return result
