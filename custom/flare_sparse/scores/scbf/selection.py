"""What a site reveals of its change: the most active channels (SCBF), or, layer by layer, the most active neurons."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ...mask import top_k
from ...params import Layout
from ...structure.graph import ChannelGraph, build_channel_graph
from ...structure.nodes import Norm, Value, Weighted
from ...structure.tracing import Untraceable
from .groups import INFINITY, Biases, Groups, Section, Selection
from .paths import compute_energies, compute_norms_through, count_rows, find_touched, list_norms
from .sampling import compute_log_path_counts, sample_norms

_ROUNDING = 1e-12
"""The norm of one channel, added up in another order, differs by less than this share of it."""


class ChannelGroups(Groups):
    """Groups of a channel graph. A change is scored by the channels through it.

    Args:
        layout: of the network.
        graph: of the network.
        biases: see :class:`Groups`.
        layer_mean: divide the energies of each layer by their mean (ALGORITHMS 2.7): no layer decides alone.
        list_up_to: so many channels are listed, and exactly k of them chosen.
        drawn: of more, the threshold is the quantile of so many drawn uniformly: the share of channels above it is
            alpha with a standard error of ``sqrt(alpha * (1 - alpha) / drawn)``.
    """

    def __init__(
        self,
        layout: Layout,
        graph: ChannelGraph,
        biases: Biases = "selected",
        *,
        layer_mean: bool = False,
        list_up_to: int = 5_000_000,
        drawn: int = 1_000_000,
    ):
        self._graph, self._layer_mean, self._drawn = graph, layer_mean, drawn
        self._owners: list[int] = []
        super().__init__(layout, [*self._weights(layout), *self._units(layout)], biases)
        lists = zip(count_rows(graph), graph.values, strict=True)
        self.exact = max(count * value.channels for count, value in lists) <= list_up_to
        self.channels = math.exp(min(float(torch.logsumexp(compute_log_path_counts(graph)[graph.output], 0)), 700.0))
        self.threshold = "threshold exact" if self.exact else f"threshold from {drawn:,} channels drawn at random"
        self.found = f"{self.channels:,.4g} channels through {len(graph.layers)} layers"

    def _weights(self, layout: Layout) -> list[Section]:
        graph, sizes = self._graph, {entry.name: entry.shape for entry in layout.tensors}
        sections = []
        for at in graph.layers:
            layer = graph.values[at]
            assert isinstance(layer, Weighted)
            name = f"{layer.module}.weight"
            assert name in sizes
            width = 1 if graph.reads_input(at) else graph.values[layer.inputs[0]].channels // layer.groups
            sections.append(Section("weight", layer.channels * width, (name,)))
        return sections

    def _units(self, layout: Layout) -> list[Section]:
        """Sections of what belongs to single units; ``_owners`` says of which value."""
        sections = []
        for at, value in enumerate(self._graph.values):
            for kind, names in _own(layout, value).items():
                sections.append(Section(kind, value.channels, names))
                self._owners.append(at)
        return sections

    def select(self, change: Tensor, rate: float, selection: Selection, draw: torch.Generator) -> list[Tensor]:
        """See :meth:`Groups.chosen`."""
        energy = self._energies(change)
        if self.exact:
            norms = list_norms(self._graph, energy)
            there = norms > -INFINITY
            selected = _top(norms, rate, there)
            if selection == "positive":
                return self._ordered(*find_touched(self._graph, selected))
            some, others = (self._ordered(*find_touched(self._graph, c)) for c in (selected, there & ~selected))
            return [a & ~b for a, b in zip(some, others, strict=True)]
        sample = sample_norms(self._graph, energy, self._drawn, draw)
        place = self._drawn - _wanted(rate, self._drawn) + 1
        threshold = sample.kthvalue(place).values * (1 - _ROUNDING)
        best = self._ordered(*compute_norms_through(self._graph, energy, best=True))
        if selection == "positive":
            return [score >= threshold for score in best]
        worst = self._ordered(*compute_norms_through(self._graph, energy, best=False))
        return [(low >= threshold) & (high > -INFINITY) for low, high in zip(worst, best, strict=True)]

    def scores(self, change: Tensor) -> list[Tensor]:
        """See :meth:`Groups.scores`."""
        return self._ordered(*compute_norms_through(self._graph, self._energies(change), best=True))

    def _energies(self, change: Tensor) -> list[Tensor]:
        energy = compute_energies(self._graph, self.layout, change)
        return [e / e.mean() if bool(e.any()) else e for e in energy] if self._layer_mean else energy

    def _ordered(self, edges: list[Tensor], units: list[Tensor]) -> list[Tensor]:
        return [*edges, *(units[at] for at in self._owners)]


class NeuronGroups(Groups):
    """Where channels cannot be followed: each layer's neurons by the squared norm of their own incoming change.

    Args:
        layout: of the network.
        biases: see :class:`Groups`.
        reason: why there is no channel graph.
    """

    exact, threshold = True, "threshold exact"

    def __init__(self, layout: Layout, biases: Biases = "selected", *, reason: str = ""):
        shapes = {entry.name: entry.shape for entry in layout.tensors}
        self._layers = [e.name for e in layout.tensors if e.role == "weight" and len(e.shape) > 1]
        with_bias = [(n, n.removesuffix("weight") + "bias") for n in self._layers]
        self._biased = [n for n, bias in with_bias if shapes.get(bias) == shapes[n][:1]]
        sections = [Section("weight", shapes[name][0], (name,)) for name in self._layers]
        sections += [Section("bias", shapes[n][0], (b,)) for n, b in with_bias if n in self._biased]
        super().__init__(layout, sections, biases)
        why = f" ({reason})" if reason else ""
        self.found = f"layer by layer, {len(self._layers)} layers: each unit is selected by its own weights{why}"

    def select(self, change: Tensor, rate: float, selection: Selection, draw: torch.Generator) -> list[Tensor]:
        """The top ``rate`` of every layer; both selections are the same here."""
        scores = self._scores(change)
        rows = {n: _top(s, rate, torch.ones_like(s, dtype=torch.bool)) for n, s in scores.items()}
        return self._ordered(rows)

    def scores(self, change: Tensor) -> list[Tensor]:
        """See :meth:`Groups.scores`."""
        return self._ordered(self._scores(change))

    def _scores(self, change: Tensor) -> dict[str, Tensor]:
        tensors = self.layout.unflatten(change)
        return {name: tensors[name].flatten(1).double().square().sum(1) for name in self._layers}

    def _ordered(self, rows: dict[str, Tensor]) -> list[Tensor]:
        return [*rows.values(), *(rows[name] for name in self._biased)]


def build_groups(layout: Layout, biases: Biases = "selected", **how: Any) -> Groups:
    """The groups of a network's channels or, where these cannot be followed, of its neurons layer by layer.

    Args:
        layout: of the network.
        biases: see :class:`Groups`.
        how: other settings of :class:`ChannelGroups`.
    """
    try:
        graph = build_channel_graph(layout)
    except Untraceable as error:
        return NeuronGroups(layout, biases, reason=str(error))
    return ChannelGroups(layout, graph, biases, **how)


def _top(norms: Tensor, rate: float, there: Tensor) -> Tensor:
    """Exactly ``ceil(rate * n)`` of the ``n`` that are there, the largest, ties to the lowest index; bool."""
    return top_k(norms.flatten(), _wanted(rate, int(there.sum()))).bits.view(norms.shape)


def _wanted(rate: float, channels: int) -> int:
    """``ceil(rate * channels)``, forgiving the last bit of a decimal rate; one at least."""
    return max(math.ceil(rate * channels - 1e-9), 1)


def _own(layout: Layout, value: Value) -> dict[Literal["bias", "statistic"], tuple[str, ...]]:
    """The entries of one number a unit that a value has, by kind."""
    if not isinstance(value, (Weighted, Norm)):
        return {}
    entries = [e for e in layout.tensors if e.name.rpartition(".")[0] == value.module and e.shape == (value.channels,)]
    found: dict[Literal["bias", "statistic"], tuple[str, ...]] = {}
    if parameters := tuple(e.name for e in entries if e.role != "buffer"):
        found["bias"] = parameters
    if statistics := tuple(e.name for e in entries if e.role == "buffer"):
        found["statistic"] = statistics
    return found
