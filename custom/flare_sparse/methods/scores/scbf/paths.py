"""Norms of channel paths, and the connections that selected paths traverse (SCBF, section 3.2, Eqs. 3 to 6).

A *channel path* runs through the channel graph: one unit in every layer from the first to the output. Its norm is the
sum of the squared deltas of its connections, where the whole row of weights that reads the network's input counts as
one connection (docs/algorithms.md, section 3.4). The number of paths is the product of the layer widths, so large
networks are handled without listing them:

* :func:`compute_extreme_norms` returns for every connection the largest or smallest norm of the paths through it, by
  dynamic programming in O(number of connections);
* :func:`list_norms` lists all norms of a small network;
* :func:`~flare_sparse.methods.scores.scbf.sampling.sample_norms` returns the norms of paths drawn uniformly from a
  large one.

*Energies* are one float64 tensor per weighted layer of the graph, in its order: ``(out,)`` for a layer that reads the
network's input, ``(out, in / groups)`` for all others. A *prefix* is the part of a path from the input to one value.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....compute.structure.graph import ChannelGraph
from ....compute.structure.nodes import Concat, InputNode, Pad, Sum, Weighted
from ....core.params import Layout

INFINITY = float("inf")


def compute_energies(graph: ChannelGraph, layout: Layout, delta: Tensor) -> list[Tensor]:
    """Compute the squared norm of the delta of every connection.

    A connection is the kernel between two channels, or all weights that read a flattened channel.

    Args:
        graph: channel graph of the network.
        layout: layout of the network.
        delta: ``(P,)``.
    """
    tensors = layout.unflatten(delta)
    energies = []
    for index in graph.layers:
        layer = _get_layer(graph, index)
        weight = tensors[f"{layer.module}.weight"]
        if graph.is_input_layer(index):
            energies.append(_compute_squared_norms(weight.reshape(layer.channels, -1)))
        else:
            width = graph.values[layer.inputs[0]].channels // layer.groups
            norms = _compute_squared_norms(weight.reshape(layer.channels * width, -1))
            energies.append(norms.view(layer.channels, width))
    return energies


def _compute_squared_norms(rows: Tensor) -> Tensor:
    """Return the sum of squares of every row, float64."""
    # float64 is exact for small integers, so that tied paths keep equal norms and ties go to the lowest index.
    return rows.double().square().sum(1)


def compute_extreme_norms(
    graph: ChannelGraph, energy: Sequence[Tensor], *, largest: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute the largest or smallest norm of the paths through every connection and every unit.

    Args:
        graph: channel graph of the network.
        energy: energies of its connections.
        largest: whether to return the largest or the smallest norms.

    Returns:
        One tensor per layer, shaped as its energies; and one per value of the graph, ``(channels,)``. Where no path
        passes, minus infinity (``largest``) or plus infinity.
    """
    no_path = -INFINITY if largest else INFINITY
    reduce = torch.amax if largest else torch.amin
    elementwise = torch.maximum if largest else torch.minimum

    def step(number: int, layer: Weighted, before: Tensor) -> Tensor:
        width = energy[number].shape[1]
        grouped = energy[number].view(layer.groups, -1, width) + before.view(layer.groups, 1, -1)
        return reduce(grouped, 2).flatten()

    prefixes = propagate(
        graph, lambda number, _: energy[number], step, lambda inputs: reduce(torch.stack(inputs), 0), no_path
    )
    # The extreme norm through a connection is that of its prefix, plus its energy, plus that of its suffix.
    suffixes: list[Tensor] = [torch.full((value.channels,), no_path, dtype=torch.float64) for value in graph.values]
    suffixes[graph.output] = torch.zeros(graph.values[graph.output].channels, dtype=torch.float64)
    edges: dict[int, Tensor] = {}
    for index in reversed(range(len(graph.values))):
        value = graph.values[index]
        if isinstance(value, Weighted):
            layer_energy = energy[graph.layers.index(index)]
            if graph.is_input_layer(index):
                edges[index] = layer_energy + suffixes[index]
                continue
            source, width = value.inputs[0], layer_energy.shape[1]
            edge = layer_energy.view(value.groups, -1, width) + suffixes[index].view(value.groups, -1, 1)
            edges[index] = (edge + prefixes[source].view(value.groups, 1, -1)).view_as(layer_energy)
            suffixes[source] = elementwise(suffixes[source], reduce(edge, 1).flatten())
        else:
            for source, part in locate_inputs(graph, index):
                suffixes[source] = elementwise(suffixes[source], suffixes[index][part])
    return [edges[index] for index in graph.layers], [a + b for a, b in zip(prefixes, suffixes, strict=True)]


def propagate(
    graph: ChannelGraph,
    begin: Callable[[int, Weighted], Tensor],
    step: Callable[[int, Weighted, Tensor], Tensor],
    add: Callable[[list[Tensor]], Tensor],
    absent: float,
) -> list[Tensor]:
    """Return numbers per channel (last axis) of each value, computed along the forward pass.

    Args:
        graph: channel graph of the network.
        begin: returns the numbers of a layer that reads the network's input, given its number among the layers.
        step: returns those of any other layer, from those of its input.
        add: returns those of a sum, from those of its inputs.
        absent: number of the channels that a padding adds.
    """
    found: list[Tensor] = []
    for index, value in enumerate(graph.values):
        inputs = [found[source] for source in value.inputs]
        if isinstance(value, Weighted):
            number = graph.layers.index(index)
            found.append(begin(number, value) if graph.is_input_layer(index) else step(number, value, inputs[0]))
        else:
            found.append(add(inputs) if isinstance(value, Sum) else join_inputs(graph, index, inputs, absent))
    return found


def join_inputs(graph: ChannelGraph, index: int, inputs: Sequence[Tensor], absent: float) -> Tensor:
    """Return the per-channel numbers (last axis) of a value that is neither a layer nor a sum, from its inputs'.

    Args:
        graph: channel graph of the network.
        index: index of the value.
        inputs: numbers of its inputs.
        absent: number of the channels that a padding adds.
    """
    value = graph.values[index]
    if isinstance(value, InputNode):
        return torch.zeros(0, dtype=torch.float64)
    if isinstance(value, Concat):
        if inputs[0].dim() == 2:
            # The inputs have different numbers of prefixes: a row that is added stands for a path that does not exist.
            rows = max(map(len, inputs))
            inputs = [torch.nn.functional.pad(part, (0, 0, 0, rows - len(part)), value=absent) for part in inputs]
        return torch.cat(list(inputs), dim=-1)
    if isinstance(value, Pad):
        after = value.channels - value.before - inputs[0].shape[-1]
        return torch.nn.functional.pad(inputs[0], (value.before, after), value=absent)
    return inputs[0]


def locate_inputs(graph: ChannelGraph, index: int) -> list[tuple[int, slice]]:
    """Return the inputs of a value that is not a layer, each with its place among the channels of the value."""
    value = graph.values[index]
    parts, start = [], value.before if isinstance(value, Pad) else 0
    for source in value.inputs:
        width = graph.values[source].channels
        parts.append((source, slice(start, start + width)))
        start += width if isinstance(value, Concat) else 0
    return parts


def list_norms(graph: ChannelGraph, energy: Sequence[Tensor]) -> list[Tensor]:
    """List for each value the norms of all its prefixes, ``(rows, channels)``; minus infinity where there is none.

    Those of the output are the norms of all paths. For a stack of layers of widths m_1 to m_L they are the paper's
    tensor T (Eq. 3) as ``(m_1 * ... , m_L)``, in C order.
    """

    def step(number: int, layer: Weighted, before: Tensor) -> Tensor:
        width = energy[number].shape[1]
        prefixes = before.view(-1, layer.groups, width).transpose(1, 2)
        steps = energy[number].view(layer.groups, -1, width).permute(2, 0, 1)
        return (prefixes[..., None] + steps).reshape(-1, layer.channels)

    return propagate(graph, lambda number, _: energy[number][None], step, torch.cat, -INFINITY)


def find_traversed(
    norms: Tensor, selected: Tensor, energy: Sequence[Tensor], prefixes: Sequence[Tensor]
) -> list[Tensor]:
    """Return which connections the selected paths traverse, and which units, as bool tensors.

    The derivative of the sum of their norms by an energy is the number of these paths through its connection.

    Args:
        norms: norms of all paths, from :func:`list_norms`.
        selected: bool, one value per path.
        energy: the energies that the norms were computed from, which require a gradient.
        prefixes: norms of the prefixes of the values whose units are wanted, from the same list.
    """
    counts = torch.autograd.grad(
        norms, [*energy, *prefixes], selected.double(), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return [*(count > 0 for count in counts[: len(energy)]), *((count > 0).any(0) for count in counts[len(energy) :])]


def _get_layer(graph: ChannelGraph, index: int) -> Weighted:
    layer = graph.values[index]
    assert isinstance(layer, Weighted)
    return layer
