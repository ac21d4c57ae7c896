"""Selection of the entries of a delta to reveal: the most active channel paths (SCBF), or neurons layer by layer."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ....compute.structure.graph import ChannelGraph, Untraceable, build_channel_graph
from ....compute.structure.nodes import NormNode, Value, Weighted
from ....core.errors import ConfigError
from ....core.mask import ceil_fraction, top_k
from ....core.params import Layout
from .groups import INFINITY, Biases, Groups, GroupSection, Selection
from .paths import compute_energies, compute_extreme_norms, find_traversed, list_norms
from .sampling import compute_log_path_counts, sample_norms

_ROUNDING = 1e-12
"""Relative bound on the difference between two norms of one path, summed in different orders."""


class ChannelGroups(Groups):
    """Groups of a channel graph; a delta is scored by the channel paths through each group.

    Args:
        layout: layout of the network.
        graph: channel graph of the network.
        biases: see :class:`Groups`.
        max_listed: up to this number, all paths are listed and exactly k of them selected.
        sample_size: for more paths, the threshold is the quantile of this number of paths drawn uniformly: the share
            of paths above it is alpha with a standard error of ``sqrt(alpha * (1 - alpha) / sample_size)``.
    """

    def __init__(
        self,
        layout: Layout,
        graph: ChannelGraph,
        biases: Biases = "selected",
        *,
        max_listed: int = 5_000_000,
        sample_size: int = 1_000_000,
    ):
        self._graph, self._sample_size = graph, sample_size
        # For each section of _build_unit_sections, the index of the graph's value whose units it belongs to.
        self._unit_values: list[int] = []
        sections = [*self._build_weight_sections(layout), *self._build_unit_sections(layout)]
        super().__init__(layout, sections, biases)
        # exp(710) overflows float64; beyond 1e304 the number is only shown.
        counts = [math.exp(min(float(torch.logsumexp(n, 0)), 700.0)) for n in compute_log_path_counts(graph)]
        self.num_paths = counts[graph.output]
        # A list may have rows for paths that do not exist. A branch that ends may have more paths than a shape can say.
        self.is_exact = round(max(counts)) <= max_listed and self._count_listed(layout) <= max_listed
        self.threshold_description = (
            "threshold exact" if self.is_exact else f"threshold from {sample_size:,} channels drawn at random"
        )
        self.description = f"{self.num_paths:,.4g} channels through {len(graph.layers)} layers"

    def _count_listed(self, layout: Layout) -> int:
        """Return the length of the longest list of norms, from shapes alone."""
        energy = compute_energies(self._graph, layout, torch.empty(layout.size, device="meta"))
        return max(norms.numel() for norms in list_norms(self._graph, energy))

    def _build_weight_sections(self, layout: Layout) -> list[GroupSection]:
        graph, shapes = self._graph, {spec.name: spec.shape for spec in layout.tensors}
        sections = []
        for index in graph.layers:
            layer = graph.values[index]
            assert isinstance(layer, Weighted)
            name = f"{layer.module}.weight"
            if name not in shapes:
                raise ConfigError(
                    f"SCBF counts the paths through each layer's own weights, and {name} is tied to those of another "
                    "layer; untie them, or choose another method"
                )
            is_input = graph.is_input_layer(index)
            width = 1 if is_input else graph.values[layer.inputs[0]].channels // layer.groups
            sections.append(GroupSection("weight", layer.channels * width, (name,)))
        return sections

    def _build_unit_sections(self, layout: Layout) -> list[GroupSection]:
        """Build the sections of biases and statistics; append the value of each to ``_unit_values``."""
        sections = []
        for index, value in enumerate(self._graph.values):
            for kind, names in _find_unit_tensors(layout, value).items():
                sections.append(GroupSection(kind, value.channels, names))
                self._unit_values.append(index)
        return sections

    def select_groups(
        self, delta: Tensor, rate: float, selection: Selection, generator: torch.Generator
    ) -> list[Tensor]:
        """See :meth:`Groups.select_groups`."""
        energy = compute_energies(self._graph, self.layout, delta)
        if self.is_exact:
            with torch.enable_grad():
                values = list_norms(self._graph, [part.requires_grad_() for part in energy])
            norms, prefixes = values[self._graph.output], [values[index] for index in self._unit_values]
            exists = norms > -INFINITY
            selected = _select_top(norms.detach(), rate, exists)
            revealed = find_traversed(norms, selected, energy, prefixes)
            if selection == "negative":
                remaining = find_traversed(norms, exists & ~selected, energy, prefixes)
                revealed = [a & ~b for a, b in zip(revealed, remaining, strict=True)]
            return revealed
        sample = sample_norms(self._graph, energy, self._sample_size, generator)
        rank = self._sample_size - _count_selected(rate, self._sample_size) + 1
        # compute_extreme_norms adds the energies of a path in another order than sample_norms. Without the tolerance
        # the path that defines the threshold might fall below it.
        threshold = sample.kthvalue(rank).values * (1 - _ROUNDING)
        largest = self._order_by_section(*compute_extreme_norms(self._graph, energy, largest=True))
        if selection == "positive":
            return [norm >= threshold for norm in largest]
        smallest = self._order_by_section(*compute_extreme_norms(self._graph, energy, largest=False))
        # Where no path passes, the smallest norm is +inf and the largest -inf: the group is not revealed.
        return [(low >= threshold) & (high > -INFINITY) for low, high in zip(smallest, largest, strict=True)]

    def compute_scores(self, delta: Tensor) -> list[Tensor]:
        """See :meth:`Groups.compute_scores`."""
        energy = compute_energies(self._graph, self.layout, delta)
        return self._order_by_section(*compute_extreme_norms(self._graph, energy, largest=True))

    def _order_by_section(self, edges: list[Tensor], units: list[Tensor]) -> list[Tensor]:
        """Return the values of edges, which are those of the weights, then those of the units of each other section."""
        return [*edges, *(units[index] for index in self._unit_values)]


class NeuronGroups(Groups):
    """Groups for networks whose channels cannot be traced: a neuron is scored by its own incoming delta.

    The score is the squared L2 norm of the delta of the neuron's weights, and each layer is ranked by itself.

    Args:
        layout: layout of the network.
        biases: see :class:`Groups`.
        reason: why there is no channel graph.
    """

    threshold_description = "threshold exact"

    def __init__(self, layout: Layout, biases: Biases = "selected", *, reason: str = ""):
        shapes = {spec.name: spec.shape for spec in layout.tensors}
        blocks = layout.transposed_groups
        self._layers = {
            s.name: GroupSection("weight", s.shape[1] * blocks[s.name], (s.name,), blocks[s.name])
            if s.name in blocks
            else GroupSection("weight", s.shape[0], (s.name,))
            for s in layout.tensors
            if s.role == "weight" and len(s.shape) > 1
        }
        biased = {name: name.removesuffix("weight") + "bias" for name in self._layers}
        biased = {name: bias for name, bias in biased.items() if shapes.get(bias) == (self._layers[name].count,)}
        self._biased_layers = list(biased)
        bias_sections = [GroupSection("bias", self._layers[name].count, (bias,)) for name, bias in biased.items()]
        super().__init__(layout, [*self._layers.values(), *bias_sections], biases)
        suffix = f" ({reason})" if reason else ""
        self.description = (
            f"layer by layer, {len(self._layers)} layers: each unit is selected by its own weights{suffix}"
        )

    def select_groups(
        self, delta: Tensor, rate: float, selection: Selection, generator: torch.Generator
    ) -> list[Tensor]:
        """Select the top ``rate`` of every layer; the positive and the negative selection coincide."""
        scores = self._score_neurons(delta)
        selected = {name: _select_top(s, rate, torch.ones_like(s, dtype=torch.bool)) for name, s in scores.items()}
        return self._order_by_section(selected)

    def compute_scores(self, delta: Tensor) -> list[Tensor]:
        """See :meth:`Groups.compute_scores`."""
        return self._order_by_section(self._score_neurons(delta))

    def _score_neurons(self, delta: Tensor) -> dict[str, Tensor]:
        tensors = self.layout.unflatten(delta)
        scores = {}
        for name, section in self._layers.items():
            tensor = tensors[name]
            if section.transposed_blocks:
                scores[name] = section.view_by_group(tensor).double().square().sum((2, 3)).flatten()
            else:
                scores[name] = tensor.flatten(1).double().square().sum(1)
        return scores

    def _order_by_section(self, by_layer: dict[str, Tensor]) -> list[Tensor]:
        """Return the values of all layers, for their weights, then those of the layers with a bias again."""
        return [*by_layer.values(), *(by_layer[name] for name in self._biased_layers)]


def build_groups(layout: Layout, biases: Biases = "selected", **settings: Any) -> Groups:
    """Build the groups of a network: of its channel paths or, if it cannot be traced, of its neurons.

    Args:
        layout: layout of the network.
        biases: see :class:`Groups`.
        settings: other settings of :class:`ChannelGroups`.
    """
    try:
        graph = build_channel_graph(layout)
    except Untraceable as error:
        return NeuronGroups(layout, biases, reason=str(error))
    return ChannelGroups(layout, graph, biases, **settings)


def _select_top(norms: Tensor, rate: float, exists: Tensor) -> Tensor:
    """Select exactly ``ceil(rate * n)`` of the ``n`` existing paths, the largest, ties to the lowest index; bool."""
    return top_k(norms.flatten(), _count_selected(rate, int(exists.sum()))).bits.view(norms.shape)


def _count_selected(rate: float, paths: int) -> int:
    """Return ``ceil(rate * paths)``, at least 1."""
    return max(ceil_fraction(rate, paths), 1)


def _find_unit_tensors(layout: Layout, value: Value) -> dict[Literal["bias", "statistic"], tuple[str, ...]]:
    """Return the names of the tensors with one number per unit of a value, by kind."""
    if not isinstance(value, (Weighted, NormNode)):
        return {}
    specs = [s for s in layout.tensors if s.name.rpartition(".")[0] == value.module and s.shape == (value.channels,)]
    names: dict[Literal["bias", "statistic"], tuple[str, ...]] = {}
    if parameters := tuple(spec.name for spec in specs if spec.role != "buffer"):
        names["bias"] = parameters
    if statistics := tuple(spec.name for spec in specs if spec.role == "buffer"):
        names["statistic"] = statistics
    return names
