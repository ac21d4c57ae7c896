"""Norms of channels, and which connections the most active ones pass through (SCBF, section 3.2, Eqs. 3 to 6).

A *channel* is a path of the channel graph: one unit in every layer from the first to the output. Its norm is the sum of
the squared changes of its connections, where the whole row of weights that reads the network's input is one connection
(ALGORITHMS 2.1, 2.4 #1 and #2). There are as many channels as products of layer widths, so they are walked, not listed:

* :func:`through` gives for every connection the largest or smallest norm of the channels through it, by dynamic
  programming in O(number of connections);
* :func:`listed` makes all norms of a small network; :func:`flare_sparse.scores.scbf.sampling.drawn` those of channels drawn
  uniformly from a large one.

*Energies* are one float64 tensor for each weighted layer of the graph, in its order: ``(out,)`` for a layer that reads
the network's input, ``(out, in / groups)`` for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...params import Layout
from ...structure.graph import ChannelGraph
from ...structure.nodes import Concat, Pad, Source, Sum, Weighted

INFINITY = float("inf")


def compute_energies(graph: ChannelGraph, layout: Layout, change: Tensor) -> list[Tensor]:
    """Squared norm of the change of every connection (of its kernel, or of all that a flattened channel feeds).

    Args:
        graph: of the network.
        layout: of the network.
        change: ``(P,)``.
    """
    tensors = layout.unflatten(change)
    found = []
    for at in graph.layers:
        layer = _layer(graph, at)
        weight = tensors[f"{layer.module}.weight"]
        if graph.reads_input(at):
            found.append(_squared_norms(weight.reshape(layer.channels, -1)))
        else:
            width = graph.values[layer.inputs[0]].channels // layer.groups
            found.append(_squared_norms(weight.reshape(layer.channels * width, -1)).view(layer.channels, width))
    return found


def _squared_norms(count_rows: Tensor) -> Tensor:
    """Sum of squares of every row, in float64: exact for whole numbers, so that ties stay ties."""
    return count_rows.double().square().sum(1)


def compute_norms_through(
    graph: ChannelGraph, energy: Sequence[Tensor], *, best: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The largest (``best``) or smallest norm of the channels through every connection and every unit.

    Returns:
        One tensor for each layer, shaped as its energies; and one for each value of the graph, ``(channels,)``. Where
        no channel passes, minus infinity (``best``) or plus infinity.
    """
    nowhere = -INFINITY if best else INFINITY
    take = torch.amax if best else torch.amin
    ahead = _forward(graph, energy, take, nowhere)
    behind: list[Tensor] = [torch.full((value.channels,), nowhere, dtype=torch.float64) for value in graph.values]
    behind[graph.output] = torch.zeros(graph.values[graph.output].channels, dtype=torch.float64)
    edges: dict[int, Tensor] = {}
    meet = torch.maximum if best else torch.minimum
    for at in reversed(range(len(graph.values))):
        value = graph.values[at]
        if isinstance(value, Weighted):
            own = energy[graph.layers.index(at)]
            if graph.reads_input(at):
                edges[at] = own + behind[at]
                continue
            before = value.inputs[0]
            edge = own.view(value.groups, -1, own.shape[1]) + behind[at].view(value.groups, -1, 1)
            edges[at] = (edge + ahead[before].view(value.groups, 1, -1)).view_as(own)
            behind[before] = meet(behind[before], take(edge, 1).flatten())
        else:
            for before, part in _split(graph, at, behind[at]):
                behind[before] = meet(behind[before], part)
    return [edges[at] for at in graph.layers], [a + b for a, b in zip(ahead, behind, strict=True)]


def _forward(
    graph: ChannelGraph, energy: Sequence[Tensor], take: Callable[[Tensor, int], Tensor], nowhere: float
) -> list[Tensor]:
    """For each value the best (or worst) norm of what leads to each of its channels, ``(channels,)``."""
    ahead: list[Tensor] = []
    for at, value in enumerate(graph.values):
        inputs = [ahead[before] for before in value.inputs]
        if isinstance(value, Weighted):
            own = energy[graph.layers.index(at)]
            if graph.reads_input(at):
                ahead.append(own)
            else:
                grouped = own.view(value.groups, -1, own.shape[1]) + inputs[0].view(value.groups, 1, -1)
                ahead.append(take(grouped, 2).flatten())
        elif isinstance(value, Sum):
            ahead.append(take(torch.stack(inputs), 0))
        else:
            ahead.append(join_inputs(graph, at, inputs, nowhere))
    return ahead


def join_inputs(graph: ChannelGraph, at: int, inputs: Sequence[Tensor], absent: float) -> Tensor:
    """What belongs to the channels of a value that is no layer and no sum, along the last axis, from its inputs'."""
    value = graph.values[at]
    if isinstance(value, Source):
        return torch.zeros(0, dtype=torch.float64)
    if isinstance(value, Concat):
        return torch.cat(list(inputs), dim=-1)
    if isinstance(value, Pad):
        after = value.channels - value.before - inputs[0].shape[-1]
        return torch.nn.functional.pad(inputs[0], (value.before, after), value=absent)
    return inputs[0]


def _split(graph: ChannelGraph, at: int, result: Tensor) -> list[tuple[int, Tensor]]:
    """The inputs of a value that is no layer, and what of its channels (last axis) belongs to each."""
    value = graph.values[at]
    parts, start = [], value.before if isinstance(value, Pad) else 0
    for before in value.inputs:
        width = graph.values[before].channels
        parts.append((before, result[..., start : start + width]))
        start += width if isinstance(value, Concat) else 0
    return parts


def count_rows(graph: ChannelGraph) -> list[int]:
    """For each value the number of rows of its list of prefixes in :func:`listed`; exact however large."""
    count: list[int] = []
    for at, value in enumerate(graph.values):
        before = [count[i] for i in value.inputs]
        if isinstance(value, Source):
            count.append(0)
        elif isinstance(value, Weighted):
            width = graph.values[value.inputs[0]].channels // value.groups
            count.append(1 if graph.reads_input(at) else before[0] * width)
        else:
            count.append(sum(before) if isinstance(value, Sum) else max(before))
    return count


def list_norms(graph: ChannelGraph, energy: Sequence[Tensor]) -> Tensor:
    """Norms of all channels, ``(rows, outputs)``; minus infinity where there is none.

    Of a stack of layers of widths m_1 to m_L this is the paper's tensor T (Eq. 3) as ``(m_1 * ... , m_L)``, in C order.
    """
    found: list[Tensor] = []
    for at, value in enumerate(graph.values):
        inputs = [found[before] for before in value.inputs]
        if isinstance(value, Weighted):
            own = energy[graph.layers.index(at)]
            if graph.reads_input(at):
                found.append(own[None])
            else:
                prefixes = inputs[0].view(-1, value.groups, own.shape[1]).transpose(1, 2)
                steps = own.view(value.groups, -1, own.shape[1]).permute(2, 0, 1)
                found.append((prefixes[..., None] + steps).reshape(-1, value.channels))
        elif value.channels == 0:
            found.append(torch.zeros(0, 0, dtype=torch.float64))
        elif isinstance(value, Sum):
            found.append(torch.cat(inputs))
        else:
            length = max(map(len, inputs))
            found.append(join_inputs(graph, at, [_lengthened(i, length) for i in inputs], -INFINITY))
    return found[graph.output]


def _lengthened(prefixes: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(prefixes, (0, 0, 0, length - len(prefixes)), value=-INFINITY)


def find_touched(graph: ChannelGraph, chosen: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Which connections and units the chosen channels pass through.

    Args:
        graph: of the network.
        chosen: bool, shaped as :func:`listed`.

    Returns:
        Bool tensors shaped as those of :func:`through`.
    """
    count = count_rows(graph)
    passed = [torch.zeros(n, value.channels, dtype=torch.bool) for n, value in zip(count, graph.values, strict=True)]
    passed[graph.output] = chosen
    edges: dict[int, Tensor] = {}
    for at in reversed(range(len(graph.values))):
        value = graph.values[at]
        if isinstance(value, Weighted):
            if graph.reads_input(at):
                edges[at] = passed[at][0]
                continue
            width = graph.values[value.inputs[0]].channels // value.groups
            steps = passed[at].view(-1, width, value.groups, value.channels // value.groups)
            edges[at] = steps.any(0).permute(1, 2, 0).reshape(value.channels, width)
            passed[value.inputs[0]] |= steps.any(3).transpose(1, 2).reshape(len(passed[value.inputs[0]]), -1)
        else:
            first = 0
            for before, part in _split(graph, at, passed[at]):
                passed[before] |= part[first : first + count[before]]
                first += count[before] if isinstance(value, Sum) else 0
    return [edges[at] for at in graph.layers], [prefixes.any(0) for prefixes in passed]


def _layer(graph: ChannelGraph, at: int) -> Weighted:
    layer = graph.values[at]
    assert isinstance(layer, Weighted)
    return layer
