"""Units (neurons, convolution channels) that can be removed, the mask that is left, and the smaller network."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import SelectionError
from ..mask import Mask
from ..params import Layout
from .graph import ChannelGraph, trace_network
from .nodes import Norm, Same, Weighted


@dataclass(frozen=True)
class RemovableLayer:
    """A hidden layer whose units can be removed one by one.

    Attributes:
        module: path of the layer that makes them.
        units: how many.
        norms: paths of the normalisations that scale them.
        readers: paths of the layers that read them.
        rectified: nodes of the traced graph that are the units after their ReLU.
    """

    module: str
    units: int
    norms: tuple[str, ...]
    readers: tuple[str, ...]
    rectified: tuple[str, ...]


def find_removable_layers(graph: ChannelGraph) -> tuple[RemovableLayer, ...]:
    """The hidden layers that units can be removed from, in the order of the forward pass.

    Not among them: the output layer; layers without a ReLU (APoZ counts its zeros); channels that meet others in a
    residual sum, a concatenation or a grouped convolution (they could only go together); group and layer norms, whose
    statistics mix channels.
    """
    found = (_removable(graph, at) for at in graph.layers)
    return tuple(part for part in found if part is not None)


def _removable(graph: ChannelGraph, at: int) -> RemovableLayer | None:
    layer = graph.values[at]
    assert isinstance(layer, Weighted)
    space, readers = _space(graph, at)
    made = [graph.values[i] for i in space]
    norms = [value for value in made if isinstance(value, Norm)]
    rectified = [value.node for value in made if isinstance(value, Same) and value.rectified]
    reading = [value for value in (graph.values[i] for i in readers) if isinstance(value, Weighted)]
    alone = len(reading) == len(readers) and all(value.groups == 1 for value in [layer, *reading])
    if graph.output in space or not rectified or not alone or not all(norm.by_channel for norm in norms):
        return None
    return RemovableLayer(
        layer.module,
        layer.channels,
        tuple(norm.module for norm in norms),
        tuple(value.module for value in reading),
        tuple(rectified),
    )


def _space(graph: ChannelGraph, at: int) -> tuple[list[int], list[int]]:
    """Values whose channels are those of value ``at``, and the values that mix them."""
    space: list[int] = [at]
    readers: list[int] = []
    for i in space:
        for later in graph.consumers[i]:
            (space if isinstance(graph.values[later], Same) else readers).append(later)
    return space, readers


def build_live_mask(layout: Layout, layers: Sequence[RemovableLayer], kept: Sequence[Tensor]) -> Mask:
    """The entries that are left when only the ``kept`` units are.

    Args:
        layout: of the network.
        layers: its removable layers.
        kept: bool ``(units,)`` for each of them.
    """
    on = torch.ones(layout.size, dtype=torch.bool)
    tensors = layout.unflatten(on)
    for layer, units in zip(layers, kept, strict=True):
        for name in (layer.module, *layer.norms):
            for entry in _own(layout, name):
                tensors[entry][~units] = False
        for name in layer.readers:
            _columns(tensors[f"{name}.weight"], layer.units)[:, ~units] = False
    return Mask(on)


def get_kept_units(layout: Layout, layers: Sequence[RemovableLayer], live: Mask) -> list[Tensor]:
    """The units that a mask leaves, bool ``(units,)`` for each layer; the inverse of :func:`build_live_mask`.

    Raises:
        SelectionError: the mask removes something else than whole units.
    """
    tensors = layout.unflatten(live.bits)
    kept = [tensors[f"{layer.module}.weight"].flatten(1).any(1) for layer in layers]
    if build_live_mask(layout, layers, kept) != live:
        raise SelectionError(f"{live} removes more than whole units, so no smaller network has its entries")
    return kept


def narrow_network(network: nn.Module, live: Mask) -> nn.Module:
    """A copy of a network that has just the ``live`` entries; its weights are to be set.

    A vector of its layout is ``live.take(vector)`` of the whole network's: removing units keeps the order of what is
    left.

    Raises:
        Untraceable: the network's connections cannot be followed.
        SelectionError: the mask removes something else than whole units.
    """
    layout, layers = Layout.from_module(network), find_removable_layers(trace_network(network))
    smaller = copy.deepcopy(network)
    for layer, units in zip(layers, get_kept_units(layout, layers, live), strict=True):
        if not bool(units.all()):
            _narrow(smaller, layer, int(units.sum()))
    return smaller


def extract_network(network: nn.Module, live: Mask) -> nn.Module:
    """The smaller network with the weights that a network has now; on inputs it gives what the masked network gives.

    Raises:
        Untraceable, SelectionError: as :func:`narrowed`.
    """
    layout, smaller = Layout.from_module(network), narrow_network(network, live)
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    values = Layout.from_module(smaller).unflatten(live.take(layout.flatten(tensors)))
    smaller.load_state_dict({**smaller.state_dict(), **values})
    return smaller


def _narrow(network: nn.Module, layer: RemovableLayer, left: int) -> None:
    for name in (layer.module, *layer.norms):
        part = network.get_submodule(name)
        for own, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            if tensor.dim():
                _replace(part, own, tensor.new_empty(left, *tensor.shape[1:]))
        _resize(part, ("out_features", "out_channels", "num_features"), left)
    for name in layer.readers:
        part = network.get_submodule(name)
        weight = part.get_parameter("weight")
        columns = weight.shape[1] // layer.units * left
        _replace(part, "weight", weight.new_empty(weight.shape[0], columns, *weight.shape[2:]))
        _resize(part, ("in_features", "in_channels"), columns)


def _replace(part: nn.Module, name: str, tensor: Tensor) -> None:
    if name in part._parameters:
        tensor = nn.Parameter(tensor)
    setattr(part, name, tensor)


def _resize(part: nn.Module, names: Sequence[str], size: int) -> None:
    for name in names:
        if hasattr(part, name):
            setattr(part, name, size)


def locate_unit_entries(layout: Layout, layer: RemovableLayer) -> Tensor:
    """Positions in a vector of the entries that belong to each unit alone, ``(units, n)``: its weights, its bias."""
    positions = layout.unflatten(torch.arange(layout.size))
    names = [entry for name in (layer.module, *layer.norms) for entry in _own(layout, name)]
    return torch.cat([positions[name].reshape(layer.units, -1) for name in names], dim=1)


def _own(layout: Layout, module: str) -> list[str]:
    """Entries of a module, parameters and buffers; the first axis of each is the unit."""
    return [entry.name for entry in layout.tensors if entry.name.rpartition(".")[0] == module and entry.shape]


def _columns(weight: Tensor, units: int) -> Tensor:
    """A weight as ``(out, units, rest)``; ``rest`` holds kernel positions, or the voxels of a flattened channel."""
    return weight.view(weight.shape[0], units, -1)
