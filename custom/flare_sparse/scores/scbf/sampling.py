"""Channels drawn uniformly from a network that has too many to list, for the quantile of their norms (ALGORITHMS 2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...structure.graph import ChannelGraph
from ...structure.nodes import Concat, Pad, Same, Sum, Weighted
from .paths import INFINITY, join_inputs


def compute_log_path_counts(graph: ChannelGraph) -> list[Tensor]:
    """Logarithm of the number of ways from the input to every channel of each value, float64."""
    found: list[Tensor] = []
    for at, value in enumerate(graph.values):
        inputs = [found[before] for before in value.inputs]
        if isinstance(value, Weighted):
            if graph.reads_input(at):
                found.append(torch.zeros(value.channels, dtype=torch.float64))
            else:
                groups = torch.logsumexp(inputs[0].view(value.groups, -1), 1)
                found.append(groups.repeat_interleave(value.channels // value.groups))
        elif isinstance(value, Sum):
            found.append(torch.logsumexp(torch.stack(inputs), 0))
        else:
            found.append(join_inputs(graph, at, inputs, -INFINITY))
    return found


def sample_norms(graph: ChannelGraph, energy: Sequence[Tensor], number: int, draw: torch.Generator) -> Tensor:
    """Norms of ``number`` channels drawn uniformly, with replacement, ``(number,)`` float64.

    Walks from the output back; the next connection is drawn in proportion to the channels that lead to it.

    Args:
        graph: of the network.
        energy: of its connections.
        number: how many.
        draw: the only source of randomness.
    """
    ways = compute_log_path_counts(graph)
    norms = torch.zeros(number, dtype=torch.float64)
    there: dict[int, list[tuple[Tensor, Tensor]]] = {
        graph.output: [(torch.arange(number), _pick(ways[graph.output], number, draw))]
    }
    for at in reversed(range(len(graph.values))):
        if at not in there:
            continue
        who, channel = _together(there.pop(at))
        if isinstance(graph.values[at], Weighted):
            own = energy[graph.layers.index(at)]
            if graph.reads_input(at):
                _add(norms, who, own.take(channel))
                continue
            before, width = graph.values[at].inputs[0], own.shape[1]
            step = _step(graph, at, ways[before], channel, draw)
            place = channel.mul_(width).add_(step if len(ways[before]) == width else step % width)
            _add(norms, who, own.take(place))
            there.setdefault(before, []).append((who, step))
        elif isinstance(graph.values[at], Same):
            there.setdefault(graph.values[at].inputs[0], []).append((who, channel))
        else:
            for before, here, channels in _back(graph, at, channel, ways, draw):
                there.setdefault(before, []).append((who[here], channels))
    return norms


def _together(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    who, channel = zip(*parts, strict=True)
    return (who[0], channel[0]) if len(parts) == 1 else (torch.cat(who), torch.cat(channel))


def _add(norms: Tensor, who: Tensor, energy: Tensor) -> None:
    """Add the energies of some of the channels; those of all where nothing forked."""
    if len(who) == len(norms) and bool((who[1:] > who[:-1]).all()):
        norms += energy
    else:
        norms.index_add_(0, who, energy)


def _pick(ways: Tensor, number: int, draw: torch.Generator) -> Tensor:
    """``number`` positions in proportion to ``exp(ways)``, int64."""
    if bool((ways == ways[0]).all()):
        return torch.randint(len(ways), (number,), generator=draw)
    shares = torch.softmax(ways, 0).cumsum(0)
    spots = torch.rand(number, dtype=torch.float64, generator=draw) * shares[-1]
    return torch.searchsorted(shares, spots, right=True).clamp_(max=len(ways) - 1)


def _step(graph: ChannelGraph, at: int, ways: Tensor, channel: Tensor, draw: torch.Generator) -> Tensor:
    """For each drawn channel at a layer, the input channel of its group that it comes from."""
    layer = graph.values[at]
    assert isinstance(layer, Weighted)
    if layer.groups == 1:
        return _pick(ways, len(channel), draw)
    group, width = channel // (layer.channels // layer.groups), len(ways) // layer.groups
    step = torch.empty_like(channel)
    for g in group.unique().tolist():
        inside = group == g
        step[inside] = g * width + _pick(ways[g * width : (g + 1) * width], int(inside.sum()), draw)
    return step


def _back(
    graph: ChannelGraph, at: int, channel: Tensor, ways: Sequence[Tensor], draw: torch.Generator
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """At a sum, a concatenation or a padding: an input, which of the drawn channels come from it, and their channel there."""
    value = graph.values[at]
    if isinstance(value, Sum):
        spot, low = torch.rand(len(channel), dtype=torch.float64, generator=draw), torch.zeros(value.channels)
        for before in value.inputs:
            high = low + torch.exp(ways[before] - ways[at]).nan_to_num(0.0)
            last = before == value.inputs[-1]  # takes what rounding leaves over
            here = (spot >= low[channel]) & ((spot < high[channel]) | last)
            yield before, here, channel[here]
            low = high
        return
    start = value.before if isinstance(value, Pad) else 0
    for before in value.inputs:
        width = graph.values[before].channels
        here = (channel >= start) & (channel < start + width)
        yield before, here, channel[here] - start
        start += width if isinstance(value, Concat) else 0
