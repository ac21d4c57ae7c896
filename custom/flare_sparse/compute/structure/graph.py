"""Channel graph of a network, traced from its code by ``torch.fx`` without running it; and what runs along it.

SCBF is defined for a stack of dense layers. Here the layers form a directed acyclic graph (convolutions, pooling,
residual sums, concatenations), and a *channel path* is any path from the input to the output (docs/algorithms.md,
section 3.4).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from ...core.errors import FlareSparseError
from ...core.params import Layout, LinearPath
from ...inputs.scaling import QuantileEncoder, StatisticsLayer, TargetScaler
from .nodes import Concat, InputNode, NormNode, Pad, Passthrough, Sum, Value, Weighted


class Untraceable(FlareSparseError):
    """The network uses an operation that the channel graph does not support."""

    code = "E_GRAPH"


_POOLS = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)
_ACTIVATIONS = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Hardtanh,
)
SCALERS = (StatisticsLayer, TargetScaler, QuantileEncoder)
"""Modules of this package that are one value of a channel graph."""
_PASSTHROUGH_MODULES = (
    *_POOLS, *_ACTIVATIONS, *SCALERS, nn.modules.dropout._DropoutNd, nn.Identity, nn.Upsample
)  # fmt: skip
_CHANNEL_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}

_RECTIFIERS = ("relu", "relu_")
_PASSTHROUGH_OPERATIONS = frozenset(
    [*_RECTIFIERS, "relu6", "leaky_relu", "elu", "gelu", "silu", "sigmoid", "tanh", "softplus", "hardtanh"]
    + ["dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone", "interpolate"]
    + [f"{kind}_pool{d}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for d in (1, 2, 3)]
)
_SUMS = ("add", "add_", "iadd")
_SCALINGS = ("mul", "mul_", "imul", "truediv", "div")
_SIZES = ("size", "shape", "getattr", "dim")


class GraphBuilder:
    """Builds the values of a channel graph, node by node.

    Nodes that are not feature maps (sizes, constants) add no value.

    Args:
        module: the traced network.
    """

    def __init__(self, module: nn.Module):
        self.values: list[Value] = []
        self._module = module
        self._indices: dict[str, int] = {}
        # Keep the number of axes after the channels of each value; None where it is unknown (the network's input).
        self._spatial_axes: list[int | None] = []
        self._used_modules: set[str] = set()
        self._node = ""

    def build_error(self, reason: str) -> Untraceable:
        """Return the error for an operation that the graph does not support."""
        name = type(self._module).__name__
        return Untraceable(f"{name}, at {self._node!r}: {reason}; channels cannot be traced through it")

    def find_index(self, node: Any) -> int:
        """Return the index of a node's value.

        Raises:
            Untraceable: the node is not a feature map.
        """
        if not isinstance(node, fx.Node) or node.name not in self._indices:
            raise self.build_error(f"{node} is not a feature map")
        return self._indices[node.name]

    def add_node(self, node: fx.Node) -> None:
        """Append the value of a node.

        Raises:
            Untraceable: the graph does not support the node's operation.
        """
        self._node = node.name
        if node.op == "placeholder":
            # Further inputs, such as attention masks, add no value; a layer that reads one raises Untraceable.
            if not self.values:
                self._append(InputNode(node.name, (), 0), None)
        elif node.op == "call_module":
            self._add_module(node, str(node.target), self._module.get_submodule(str(node.target)))
        elif node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
            self._add_operation(node, name)

    def _append(self, value: Value, spatial_axes: int | None) -> None:
        self._indices[value.node] = len(self.values)
        self.values.append(value)
        self._spatial_axes.append(spatial_axes)

    def _add_passthrough(self, node: fx.Node, *, rectified: bool = False, removed_axes: int | None = 0) -> None:
        """Append a value with its input's channels; ``removed_axes`` spatial axes are removed, None for all."""
        source = self.find_index(node.args[0])
        axes = self._spatial_axes[source]
        remaining = 0 if removed_axes is None else None if axes is None else max(axes - removed_axes, 0)
        self._append(Passthrough(node.name, (source,), self.values[source].channels, rectified), remaining)

    def _add_module(self, node: fx.Node, path: str, part: nn.Module) -> None:
        source = self.find_index(node.args[0])
        channels, axes = self.values[source].channels, self._spatial_axes[source]
        if isinstance(part, nn.Linear):
            if axes or (channels and part.in_features % channels):
                raise self.build_error("a linear layer that does not read flattened channels")
            self._append(Weighted(node.name, (source,), part.out_features, self._use_module(path)), 0)
        elif type(part) in _CONVOLUTIONS:
            assert isinstance(part, nn.modules.conv._ConvNd)
            if channels == 0 and part.groups > 1:
                raise self.build_error("a grouped convolution of the input")
            weighted = Weighted(node.name, (source,), part.out_channels, self._use_module(path), part.groups)
            self._append(weighted, _CONVOLUTIONS[type(part)])
        elif isinstance(part, (*_CHANNEL_NORMS, nn.GroupNorm, nn.LayerNorm)):
            by_channel = isinstance(part, _CHANNEL_NORMS)
            norm = NormNode(node.name, (source,), channels, module=self._use_module(path), by_channel=by_channel)
            self._append(norm, axes)
        elif isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
            self._add_passthrough(node, removed_axes=None)
        elif isinstance(part, _PASSTHROUGH_MODULES):
            self._add_passthrough(node, rectified=isinstance(part, nn.ReLU))
        else:
            raise self.build_error(f"a {type(part).__name__}")

    def _use_module(self, path: str) -> str:
        # The channels of a module that is called twice would belong to two values, and its delta to both.
        if path in self._used_modules:
            raise self.build_error(f"{path} is used twice")
        self._used_modules.add(path)
        return path

    def _add_operation(self, node: fx.Node, name: str) -> None:
        # A size, or a number computed from sizes alone, is not a feature map.
        if name in _SIZES or not any(arg.name in self._indices for arg in node.all_input_nodes):
            return
        if name in _PASSTHROUGH_OPERATIONS:
            self._add_passthrough(node, rectified=name in _RECTIFIERS)
        elif name in _SUMS and sum(isinstance(arg, fx.Node) for arg in node.args[:2]) == 2:
            self._add_sum(node, [self.find_index(arg) for arg in node.args[:2]])
        elif name in (*_SUMS, *_SCALINGS) and isinstance(node.args[1], (int, float)):
            self._add_passthrough(node)
        elif name in ("cat", "concat") and _get_argument(node, 1, "dim") == 1:
            self._add_concat(node, [self.find_index(part) for part in list(node.args[0])])  # type: ignore[arg-type]
        elif _is_flatten(node, name):
            self._add_passthrough(node, removed_axes=None)
        elif name == "mean" and (axes := _count_spatial_axes(_get_argument(node, 1, "dim"))):
            self._add_passthrough(node, removed_axes=0 if _get_argument(node, 2, "keepdim") else axes)
        elif name == "getitem" and _is_spatial_index(node.args[1]):
            self._add_passthrough(node)
        elif name == "pad":
            self._add_pad(node)
        else:
            raise self.build_error(f"the operation {name!r}")

    def _add_sum(self, node: fx.Node, inputs: list[int]) -> None:
        if len({self.values[index].channels for index in inputs}) > 1:
            raise self.build_error("a sum of different channels")
        if len(set(inputs)) < len(inputs):
            raise self.build_error("a value added to itself")
        self._append(Sum(node.name, tuple(inputs), self.values[inputs[0]].channels), self._spatial_axes[inputs[0]])

    def _add_concat(self, node: fx.Node, inputs: list[int]) -> None:
        channels = [self.values[index].channels for index in inputs]
        if 0 in channels:
            raise self.build_error("the input concatenated with other channels")
        self._append(Concat(node.name, tuple(inputs), sum(channels)), self._spatial_axes[inputs[0]])

    def _add_pad(self, node: fx.Node) -> None:
        source = self.find_index(node.args[0])
        widths, axes = _get_argument(node, 1, "pad"), self._spatial_axes[source]
        pads_zeros = node.kwargs.get("mode", "constant") == "constant" and not node.kwargs.get("value")
        if (
            not isinstance(widths, Sequence)
            or not all(isinstance(w, int) for w in widths)
            or axes is None
            or not pads_zeros
        ):
            raise self.build_error("padding other than constant zeros")
        # torch lists the widths from the last axis backwards, so the channels come after the spatial axes.
        channel_widths = list(widths[2 * axes : 2 * axes + 2]) or [0, 0]
        value = self.values[source]
        if value.channels == 0 and any(channel_widths):
            raise self.build_error("channels padded to the input")
        self._append(Pad(node.name, (source,), value.channels + sum(channel_widths), channel_widths[0]), axes)


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


def _get_argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _is_flatten(node: fx.Node, name: str) -> bool:
    """Return whether a node is ``flatten(x, 1)``, ``x.view(n, -1)`` or ``x.reshape(n, -1)``."""
    if name == "flatten":
        return _get_argument(node, 1, "start_dim") == 1 and _get_argument(node, 2, "end_dim") in (None, -1)
    return name in ("view", "reshape") and len(node.args) == 3 and bool(node.args[2] == -1)


def _count_spatial_axes(axes: Any) -> int:
    """Return the number of axes if all of them come after the channels, else 0."""
    axes = (axes,) if isinstance(axes, int) else axes
    all_spatial = isinstance(axes, Sequence) and all(isinstance(a, int) and a >= 2 for a in axes)
    return len(axes) if all_spatial else 0


def _is_spatial_index(index: Any) -> bool:
    """Return whether an index keeps all of the batch and of the channels."""
    everything = slice(None, None, None)
    return isinstance(index, tuple) and len(index) > 2 and index[:2] == (everything, everything)
