"""Channel paths drawn uniformly, to estimate a quantile of their norms where there are too many to list.

See docs/algorithms.md, section 3.5.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ....compute.structure.graph import ChannelGraph
from ....compute.structure.nodes import Passthrough, Sum, Weighted
from .paths import INFINITY, locate_inputs, propagate


def compute_log_path_counts(graph: ChannelGraph) -> list[Tensor]:
    """Compute the logarithm of the number of paths from the input to every channel of each value, float64."""

    # Logarithms, because the counts are products of layer widths and overflow float64 in deep networks.
    def step(_: int, layer: Weighted, before: Tensor) -> Tensor:
        groups = torch.logsumexp(before.view(layer.groups, -1), 1)
        return groups.repeat_interleave(layer.channels // layer.groups)

    return propagate(
        graph,
        lambda _, layer: torch.zeros(layer.channels, dtype=torch.float64),
        step,
        lambda inputs: torch.logsumexp(torch.stack(inputs), 0),
        -INFINITY,
    )


def sample_norms(graph: ChannelGraph, energy: Sequence[Tensor], number: int, generator: torch.Generator) -> Tensor:
    """Draw channel paths uniformly, with replacement, and return their norms, ``(number,)`` float64.

    The walk runs from the output back to the input. Each step draws a connection with probability proportional to the
    number of paths that lead to it, which makes the drawn paths uniform.

    Args:
        graph: channel graph of the network.
        energy: energies of its connections, see :mod:`flare_sparse.methods.scores.scbf.paths`.
        number: number of paths to draw.
        generator: the only source of randomness.
    """
    log_counts = compute_log_path_counts(graph)
    norms = torch.zeros(number, dtype=torch.float64)
    # Paths that have reached a value but not passed it: (path numbers, their channel of that value). A residual sum
    # splits the paths among its inputs, so several parts may wait at one value.
    pending: dict[int, list[tuple[Tensor, Tensor]]] = {
        graph.output: [(torch.arange(number), _sample_positions(log_counts[graph.output], number, generator))]
    }
    for index in reversed(range(len(graph.values))):
        if index not in pending:
            continue
        paths, channels = (torch.cat(parts) for parts in zip(*pending.pop(index), strict=True))
        value = graph.values[index]
        if isinstance(value, Weighted):
            layer_energy = energy[graph.layers.index(index)]
            if graph.is_input_layer(index):
                norms.index_add_(0, paths, layer_energy.take(channels))
                continue
            source, width = value.inputs[0], layer_energy.shape[1]
            sources = _sample_input_channels(graph, index, log_counts[source], channels, generator)
            # Take positions in the flattened (out, in / groups) energies; the column counts within the channel's group.
            norms.index_add_(0, paths, layer_energy.take(channels * width + sources % width))
            pending.setdefault(source, []).append((paths, sources))
        elif isinstance(value, Passthrough):
            pending.setdefault(value.inputs[0], []).append((paths, channels))
        else:
            for source, selected, sources in _assign_to_inputs(graph, index, channels, log_counts, generator):
                pending.setdefault(source, []).append((paths[selected], sources))
    return norms


def _sample_positions(log_weights: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draw ``number`` positions with probability proportional to ``exp(log_weights)``, int64."""
    if bool((log_weights == log_weights[0]).all()):
        return torch.randint(len(log_weights), (number,), generator=generator)
    cumulative = torch.softmax(log_weights, 0).cumsum(0)
    # Scaled by the last sum, which rounding leaves a little off 1.
    points = torch.rand(number, dtype=torch.float64, generator=generator) * cumulative[-1]
    return torch.searchsorted(cumulative, points, right=True).clamp_(max=len(log_weights) - 1)


def _sample_input_channels(
    graph: ChannelGraph, index: int, log_counts: Tensor, channels: Tensor, generator: torch.Generator
) -> Tensor:
    """For each path at a layer, draw the input channel, within its group, that the path comes from."""
    layer = graph.values[index]
    assert isinstance(layer, Weighted)
    group_of_path, width = channels // (layer.channels // layer.groups), len(log_counts) // layer.groups
    sources = torch.empty_like(channels)
    for group in group_of_path.unique().tolist():
        in_group = group_of_path == group
        weights = log_counts[group * width : (group + 1) * width]
        sources[in_group] = group * width + _sample_positions(weights, int(in_group.sum()), generator)
    return sources


def _assign_to_inputs(
    graph: ChannelGraph, index: int, channels: Tensor, log_counts: Sequence[Tensor], generator: torch.Generator
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """At a sum, concatenation or padding, assign each path to the input that it comes from.

    Yields:
        The index of an input, a bool tensor of the paths that come from it, and their channels of that input.
    """
    value = graph.values[index]
    if isinstance(value, Sum):
        points = torch.rand(len(channels), dtype=torch.float64, generator=generator)
        low = torch.zeros(value.channels)
        for source in value.inputs:
            # A channel without paths has probability exp(-inf - -inf) = NaN, to be read as 0.
            high = low + torch.exp(log_counts[source] - log_counts[index]).nan_to_num(0.0)
            # The probabilities may sum to slightly less than 1; the last input takes the remainder.
            is_last = source == value.inputs[-1]
            selected = (points >= low[channels]) & ((points < high[channels]) | is_last)
            yield source, selected, channels[selected]
            low = high
        return
    for source, part in locate_inputs(graph, index):
        selected = (channels >= part.start) & (channels < part.stop)
        yield source, selected, channels[selected] - part.start
