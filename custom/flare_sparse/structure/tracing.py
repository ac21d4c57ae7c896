"""One node of a traced forward pass after the other becomes a value of the channel graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from ..errors import FlareSparseError
from .nodes import Concat, Norm, Pad, Same, Source, Sum, Value, Weighted


class Untraceable(FlareSparseError):
    """The network does something that the channel graph has no word for."""

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
_SAME_MODULES = (*_POOLS, *_ACTIVATIONS, nn.modules.dropout._DropoutNd, nn.Identity, nn.Upsample)
_BY_CHANNEL = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}

_RECTIFIERS = ("relu", "relu_")
_SAME_NAMES = frozenset(
    [*_RECTIFIERS, "relu6", "leaky_relu", "elu", "gelu", "silu", "sigmoid", "tanh", "softplus", "hardtanh"]
    + ["dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone", "interpolate"]
    + [f"{how}_pool{d}d" for how in ("max", "avg", "adaptive_avg", "adaptive_max") for d in (1, 2, 3)]
)
_SUMS = ("add", "add_", "iadd")
_SCALINGS = ("mul", "mul_", "imul", "truediv", "div")
_SIZES = ("size", "shape", "getattr", "dim")


class Reader:
    """Collects values; nodes that are no feature maps (sizes, constants) are passed over.

    Args:
        module: the traced network.
    """

    def __init__(self, module: nn.Module):
        self.values: list[Value] = []
        self._module = module
        self._at: dict[str, int] = {}
        self._space: list[int | None] = []  # axes behind the channels; None while the input's are not known
        self._used: set[str] = set()
        self._node = ""

    def refuse(self, why: str) -> Untraceable:
        """The error for what the graph has no word for."""
        kind = type(self._module).__name__
        return Untraceable(f"{kind}, at {self._node!r}: {why}; channels cannot be followed through it")

    def position(self, node: Any) -> int:
        """Where the value of a node is.

        Raises:
            Untraceable: it is not a feature map.
        """
        if not isinstance(node, fx.Node) or node.name not in self._at:
            raise self.refuse(f"{node} is not a feature map")
        return self._at[node.name]

    def read(self, node: fx.Node) -> None:
        """Append the value of a node.

        Raises:
            Untraceable: the graph has no word for it.
        """
        self._node = node.name
        if node.op == "placeholder":
            if not self.values:
                self._append(Source(node.name, (), 0), None)
        elif node.op == "call_module":
            self._call_module(node, str(node.target), self._module.get_submodule(str(node.target)))
        elif node.op in ("call_function", "call_method"):
            self._call(node, node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?"))

    def _append(self, value: Value, space: int | None) -> None:
        self._at[value.node] = len(self.values)
        self.values.append(value)
        self._space.append(space)

    def _same(self, node: fx.Node, *, rectified: bool = False, lost: int | None = 0) -> None:
        """Of the axes behind the channels, ``lost`` go; None: all of them."""
        at = self.position(node.args[0])
        space = self._space[at]
        left = 0 if lost is None else None if space is None else max(space - lost, 0)
        self._append(Same(node.name, (at,), self.values[at].channels, rectified), left)

    def _call_module(self, node: fx.Node, path: str, part: nn.Module) -> None:
        at = self.position(node.args[0])
        channels, space = self.values[at].channels, self._space[at]
        if isinstance(part, nn.Linear):
            if space or (channels and part.in_features % channels):
                raise self.refuse("a linear layer that does not read flattened channels")
            self._append(Weighted(node.name, (at,), part.out_features, self._once(path)), 0)
        elif type(part) in _CONVOLUTIONS:
            assert isinstance(part, nn.modules.conv._ConvNd)
            if channels == 0 and part.groups > 1:
                raise self.refuse("a grouped convolution of the input")
            weighted = Weighted(node.name, (at,), part.out_channels, self._once(path), part.groups)
            self._append(weighted, _CONVOLUTIONS[type(part)])
        elif isinstance(part, (*_BY_CHANNEL, nn.GroupNorm, nn.LayerNorm)):
            by_channel = isinstance(part, _BY_CHANNEL)
            self._append(Norm(node.name, (at,), channels, module=self._once(path), by_channel=by_channel), space)
        elif isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1):
            self._same(node, lost=None)
        elif isinstance(part, _SAME_MODULES):
            self._same(node, rectified=isinstance(part, nn.ReLU))
        else:
            raise self.refuse(f"a {type(part).__name__}")

    def _once(self, path: str) -> str:
        """A module whose weights serve in two places has no channels of its own."""
        if path in self._used:
            raise self.refuse(f"{path} is used twice")
        self._used.add(path)
        return path

    def _call(self, node: fx.Node, name: str) -> None:
        if name in _SIZES or not any(arg.name in self._at for arg in node.all_input_nodes):
            return  # a size, or something made of sizes alone
        if name in _SAME_NAMES:
            self._same(node, rectified=name in _RECTIFIERS)
        elif name in _SUMS and _nodes(node.args[:2]) == 2:
            self._sum(node, [self.position(arg) for arg in node.args[:2]])
        elif name in (*_SUMS, *_SCALINGS) and isinstance(node.args[1], (int, float)):
            self._same(node)
        elif name in ("cat", "concat") and _argument(node, 1, "dim") == 1:
            self._concat(node, [self.position(part) for part in list(node.args[0])])  # type: ignore[arg-type]
        elif _flattens(node, name):
            self._same(node, lost=None)
        elif name == "mean" and (axes := _spatial(_argument(node, 1, "dim"))):
            self._same(node, lost=0 if _argument(node, 2, "keepdim") else axes)
        elif name == "getitem" and _keeps(node.args[1]):
            self._same(node)
        elif name == "pad":
            self._pad(node)
        else:
            raise self.refuse(f"the operation {name!r}")

    def _sum(self, node: fx.Node, inputs: list[int]) -> None:
        if len({self.values[at].channels for at in inputs}) > 1:
            raise self.refuse("a sum of different channels")
        if len(set(inputs)) < len(inputs):
            raise self.refuse("a value added to itself")
        self._append(Sum(node.name, tuple(inputs), self.values[inputs[0]].channels), self._space[inputs[0]])

    def _concat(self, node: fx.Node, inputs: list[int]) -> None:
        channels = [self.values[at].channels for at in inputs]
        if 0 in channels:
            raise self.refuse("the input beside other channels")
        self._append(Concat(node.name, tuple(inputs), sum(channels)), self._space[inputs[0]])

    def _pad(self, node: fx.Node) -> None:
        at = self.position(node.args[0])
        widths, space = _argument(node, 1, "pad"), self._space[at]
        plain = node.kwargs.get("mode", "constant") == "constant" and not node.kwargs.get("value")
        if (
            not isinstance(widths, Sequence)
            or not all(isinstance(w, int) for w in widths)
            or space is None
            or not plain
        ):
            raise self.refuse("padding that is not plain zeros")
        around = list(widths[2 * space : 2 * space + 2]) or [0, 0]
        value = self.values[at]
        if value.channels == 0 and any(around):
            raise self.refuse("new channels beside the input")
        self._append(Pad(node.name, (at,), value.channels + sum(around), around[0]), space)


def _nodes(args: Sequence[Any]) -> int:
    return sum(isinstance(arg, fx.Node) for arg in args)


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _flattens(node: fx.Node, name: str) -> bool:
    """``flatten(x, 1)``, or ``x.view(n, -1)`` and ``x.reshape(n, -1)``."""
    if name == "flatten":
        return _argument(node, 1, "start_dim") == 1 and _argument(node, 2, "end_dim") in (None, -1)
    return name in ("view", "reshape") and len(node.args) == 3 and bool(node.args[2] == -1)


def _spatial(axes: Any) -> int:
    """How many axes, if all of them lie behind the channels; else 0."""
    axes = (axes,) if isinstance(axes, int) else axes
    behind = isinstance(axes, Sequence) and all(isinstance(a, int) and a >= 2 for a in axes)
    return len(axes) if behind else 0


def _keeps(index: Any) -> bool:
    """An index that leaves batch and channels alone."""
    whole = slice(None, None, None)
    return isinstance(index, tuple) and len(index) > 2 and index[:2] == (whole, whole)
