"""Removal of units (neurons, convolution channels): removable layers, the live mask, and the smaller network.

See docs/algorithms.md, section 3.8.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...core.errors import SelectionError
from ...core.mask import Mask
from ...core.params import Layout
from .graph import ChannelGraph, trace_network
from .nodes import NormNode, Passthrough, Weighted


@dataclass(frozen=True)
class RemovableLayer:
    """A hidden layer whose units can be removed one by one.

    Attributes:
        module: path of the layer.
        units: number of units.
        norms: paths of the normalisations applied to the units.
        readers: paths of the layers that read the units.
        rectified: nodes of the traced graph that hold the units after their ReLU.
    """

    module: str
    units: int
    norms: tuple[str, ...]
    readers: tuple[str, ...]
    rectified: tuple[str, ...]


def find_removable_layers(graph: ChannelGraph) -> tuple[RemovableLayer, ...]:
    """Return the hidden layers whose units can be removed, in the order of the forward pass.

    These layers are excluded: the output layer; layers without a ReLU, because APoZ counts the zeros after it; layers
    with channels that enter a residual sum, a concatenation or a grouped convolution, because such channels can only be
    removed together with others; and layers followed by a group or layer norm, because its statistics mix channels.
    """
    layers = (_build_removable_layer(graph, index) for index in graph.layers)
    return tuple(layer for layer in layers if layer is not None)


def _build_removable_layer(graph: ChannelGraph, index: int) -> RemovableLayer | None:
    layer = graph.values[index]
    assert isinstance(layer, Weighted)
    same_channels, consumers = _follow_channels(graph, index)
    values = [graph.values[i] for i in same_channels]
    norms = [value for value in values if isinstance(value, NormNode)]
    rectified = [value.node for value in values if isinstance(value, Passthrough) and value.rectified]
    readers = [value for value in (graph.values[i] for i in consumers) if isinstance(value, Weighted)]
    is_separable = len(readers) == len(consumers) and all(value.groups == 1 for value in [layer, *readers])
    is_output = graph.output in same_channels
    if is_output or not rectified or not is_separable or not all(norm.by_channel for norm in norms):
        return None
    return RemovableLayer(
        layer.module,
        layer.channels,
        tuple(norm.module for norm in norms),
        tuple(value.module for value in readers),
        tuple(rectified),
    )


def _follow_channels(graph: ChannelGraph, index: int) -> tuple[list[int], list[int]]:
    """Return the values whose channels are those of a value, and the values that mix them."""
    same_channels: list[int] = [index]
    consumers: list[int] = []
    # The list grows while it is iterated over, which makes this a breadth-first walk.
    for i in same_channels:
        for consumer in graph.consumers[i]:
            (same_channels if isinstance(graph.values[consumer], Passthrough) else consumers).append(consumer)
    return same_channels, consumers


def build_live_mask(layout: Layout, layers: Sequence[RemovableLayer], kept: Sequence[Tensor]) -> Mask:
    """Return the entries that remain when only the ``kept`` units do.

    Args:
        layout: layout of the network.
        layers: its removable layers.
        kept: bool ``(units,)`` for each of these layers.
    """
    bits = torch.ones(layout.size, dtype=torch.bool)
    tensors = layout.unflatten(bits)
    for layer, units in zip(layers, kept, strict=True):
        for name in (layer.module, *layer.norms):
            for tensor in _list_unit_tensors(layout, name):
                tensors[tensor][~units] = False
        for name in layer.readers:
            _view_by_unit(tensors[f"{name}.weight"], layer.units)[:, ~units] = False
    return Mask(bits)


def get_kept_units(layout: Layout, layers: Sequence[RemovableLayer], live: Mask) -> list[Tensor]:
    """Return the units that a mask keeps, bool ``(units,)`` for each layer; the inverse of :func:`build_live_mask`.

    Raises:
        SelectionError: the mask removes entries other than those of complete units.
    """
    tensors = layout.unflatten(live.bits)
    kept = [tensors[f"{layer.module}.weight"].flatten(1).any(1) for layer in layers]
    if build_live_mask(layout, layers, kept) != live:
        raise SelectionError(f"{live} does not consist of complete units, so no smaller network has its entries")
    return kept


def narrow_network(network: nn.Module, live: Mask) -> nn.Module:
    """Return a copy of a network that has only the ``live`` entries, with their values.

    Removing units keeps the order of the remaining entries, so if ``vector`` belongs to the network,
    ``live.take(vector)`` belongs to the copy. It computes the same function as the masked network.

    Raises:
        Untraceable: the network's channels cannot be traced.
        SelectionError: the mask removes entries other than those of complete units.
    """
    layout, layers = Layout.from_module(network), find_removable_layers(trace_network(network))
    return cut_units(network, layers, get_kept_units(layout, layers, live))


def cut_units(network: nn.Module, layers: Sequence[RemovableLayer], kept: Sequence[Tensor]) -> nn.Module:
    """Return a copy of a network with only the ``kept`` units, bool ``(units,)`` for each layer."""
    smaller = copy.deepcopy(network)
    for layer, units in zip(layers, kept, strict=True):
        if not bool(units.all()):
            _cut_layer(smaller, layer, units.nonzero().squeeze(1))
    return smaller


def remove_silent_units(network: nn.Module) -> nn.Module:
    """Return the smaller network without the removable units whose own parameters are all zero.

    Such a unit is zero behind its ReLU for every input. A layer keeps one unit at least.

    Raises:
        Untraceable: as :func:`narrow_network`.
    """
    layout, layers = Layout.from_module(network), find_removable_layers(trace_network(network))
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    # A running mean or variance acts only through the norm's own weight and bias.
    vector = torch.where(layout.select(lambda spec: spec.role == "buffer"), 0.0, layout.flatten(tensors))
    kept = [(vector[locate_unit_entries(layout, layer)] != 0).any(1) for layer in layers]
    for units in kept:
        units[0] |= not bool(units.any())
    return cut_units(network, layers, kept)


def _cut_layer(network: nn.Module, layer: RemovableLayer, units: Tensor) -> None:
    """Keep only the ``units`` (indices) of a layer, its norms and its readers, in place."""
    for path in (layer.module, *layer.norms):
        part = network.get_submodule(path)
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            # A scalar, such as num_batches_tracked, belongs to no unit.
            if tensor.dim():
                _replace_tensor(part, name, tensor.detach().index_select(0, units.to(tensor.device)))
        _set_sizes(part, ("out_features", "out_channels", "num_features"), len(units))
    for path in layer.readers:
        part = network.get_submodule(path)
        weight = part.get_parameter("weight").detach()
        by_unit = weight.unflatten(1, (layer.units, -1)).index_select(1, units.to(weight.device))
        _replace_tensor(part, "weight", by_unit.flatten(1, 2))
        _set_sizes(part, ("in_features", "in_channels"), part.get_parameter("weight").shape[1])


def _replace_tensor(part: nn.Module, name: str, tensor: Tensor) -> None:
    if (old := part._parameters.get(name)) is not None:
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
    setattr(part, name, tensor)


def _set_sizes(part: nn.Module, names: Sequence[str], size: int) -> None:
    for name in names:
        if hasattr(part, name):
            setattr(part, name, size)


def locate_unit_entries(layout: Layout, layer: RemovableLayer) -> Tensor:
    """Return the positions of the entries that belong to one unit alone (weights, bias, norm), ``(units, n)``."""
    positions = layout.unflatten(torch.arange(layout.size))
    names = [tensor for path in (layer.module, *layer.norms) for tensor in _list_unit_tensors(layout, path)]
    return torch.cat([positions[name].reshape(layer.units, -1) for name in names], dim=1)


def _list_unit_tensors(layout: Layout, module: str) -> list[str]:
    """Return the names of a module's tensors whose first axis is the unit: parameters and buffers."""
    return [spec.name for spec in layout.tensors if spec.name.rpartition(".")[0] == module and spec.shape]


def _view_by_unit(weight: Tensor, units: int) -> Tensor:
    """View a weight as ``(out, units, rest)``; ``rest`` are kernel positions or voxels of a flattened channel."""
    return weight.view(weight.shape[0], units, -1)
