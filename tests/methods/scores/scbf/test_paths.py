"""Path norms and selections against brute force over all paths (docs/algorithms.md, sections 3.4, 3.5 and 3.11)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases
from torch import Tensor, nn

from flare_sparse.compute.structure.graph import ChannelGraph, build_channel_graph
from flare_sparse.compute.structure.nodes import Concat, InputNode, Pad, Sum, Weighted
from flare_sparse.core.params import Layout
from flare_sparse.methods.scores.scbf import paths as channels
from flare_sparse.methods.scores.scbf.groups import Selection
from flare_sparse.methods.scores.scbf.sampling import compute_log_path_counts, sample_norms
from flare_sparse.methods.scores.scbf.selection import ChannelGroups

DRAW = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Path:
    """A channel path: its connections (layer, output, input; None for the network's input) and its units."""

    edges: tuple[tuple[int, int, int | None], ...]
    units: tuple[tuple[int, int], ...]


def paths(graph: ChannelGraph, at: int, channel: int) -> Iterator[Path]:
    """Enumerate the paths from the input to a channel of a value, by recursion."""
    value = graph.values[at]
    unit = (at, channel)
    if isinstance(value, InputNode) or value.channels == 0:
        return
    if isinstance(value, Weighted):
        if graph.is_input_layer(at):
            yield Path(((at, channel, None),), (unit,))
            return
        width = graph.values[value.inputs[0]].channels // value.groups
        group = channel // (value.channels // value.groups)
        for i in range(width):
            for path in paths(graph, value.inputs[0], group * width + i):
                yield Path((*path.edges, (at, channel, i)), (*path.units, unit))
        return
    offset = value.before if isinstance(value, Pad) else 0
    for source in value.inputs:
        source_channel = channel - offset
        if 0 <= source_channel < graph.values[source].channels:
            for path in paths(graph, source, source_channel):
                yield Path(path.edges, (*path.units, unit))
        offset += graph.values[source].channels if isinstance(value, Concat) else 0
        if isinstance(value, Sum):
            offset = 0


def norm(graph: ChannelGraph, path: Path, energy: list[Tensor]) -> float:
    position = {at: n for n, at in enumerate(graph.layers)}
    return sum(
        float(energy[position[at]][out] if i is None else energy[position[at]][out, i]) for at, out, i in path.edges
    )


class Brute:
    """All paths of a network and their norms."""

    def __init__(self, network: nn.Module, delta: Tensor):
        self.layout = Layout.from_module(network)
        self.graph = build_channel_graph(self.layout)
        self.energy = channels.compute_energies(self.graph, self.layout, delta)
        output = self.graph.values[self.graph.output]
        self.paths = [p for j in range(output.channels) for p in paths(self.graph, self.graph.output, j)]
        self.norms = np.array([norm(self.graph, path, self.energy) for path in self.paths])

    def traversed(self, chosen: np.ndarray) -> tuple[set[object], set[object]]:
        picked = [path for path, take in zip(self.paths, chosen, strict=True) if take]
        return {e for p in picked for e in p.edges}, {u for p in picked for u in p.units}


def as_sets(graph: ChannelGraph, edges: list[Tensor], units: list[Tensor]) -> tuple[set[object], set[object]]:
    selected: set[object] = set()
    for at, mask in zip(graph.layers, edges, strict=True):
        if mask.dim() == 1:
            selected |= {(at, int(o), None) for o in torch.nonzero(mask).flatten()}
        else:
            selected |= {(at, int(o), int(i)) for o, i in torch.nonzero(mask)}
    return selected, {(at, int(c)) for at, mask in enumerate(units) for c in torch.nonzero(mask).flatten()}


class Residual(nn.Module):
    """A residual sum, a grouped convolution, a concatenation and a shortcut with padded channels."""

    def __init__(self, a: int, b: int, groups: int):
        super().__init__()
        self.stem = nn.Conv2d(2, a * groups, 3, padding=1)
        self.grouped = nn.Conv2d(a * groups, b * groups, 3, padding=1, groups=groups)
        self.norm = nn.BatchNorm2d(b * groups)
        self.back = nn.Conv2d(b * groups, a * groups, 1)
        self.other = nn.Conv2d(2, 2, 1)
        self.wide = nn.Conv2d(a * groups + 2, a * groups + 5, 1)
        self.head = nn.Linear(4 * (a * groups + 5), 2)
        self.extra = a * groups + 5 - (a * groups + 2)

    def forward(self, x: Tensor) -> Tensor:
        stem = torch.relu(self.stem(x))
        inner = self.back(torch.relu(self.norm(self.grouped(stem))))
        joined = torch.cat([stem + inner, self.other(x)], dim=1)
        padded = nn.functional.pad(joined, (0, 0, 0, 0, 1, self.extra - 1))
        return self.head((self.wide(joined) + padded).flatten(1))


def stack(widths: list[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for source, after in pairwise(widths):
        layers += [nn.Linear(source, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """Draw a stack or a residual network with a delta of integers (which has ties) or of reals."""
    if draw(st.booleans()):
        network = stack([draw(st.integers(1, 4)) for _ in range(draw(st.integers(2, 5)))])
    else:
        network = Residual(draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = Layout.from_module(network).size
    whole = torch.randint(-2, 3, (size,), generator=random).float()
    return network, whole if draw(st.booleans()) else torch.randn(size, generator=random)


CASES = settings(max_examples=count_cases(150), deadline=None)


@pytest.mark.slow
@CASES
@given(networks())
def test_listed_norms_equal_brute_force(case: tuple[nn.Module, Tensor]) -> None:
    brute = Brute(*case)
    norms = channels.list_norms(brute.graph, brute.energy)[-1]
    existing = norms[norms > -math.inf]
    np.testing.assert_allclose(np.sort(existing.numpy()), np.sort(brute.norms), rtol=1e-12)
    counted = float(torch.logsumexp(compute_log_path_counts(brute.graph)[brute.graph.output], 0))
    assert round(math.exp(counted)) == len(brute.paths)


@pytest.mark.slow
@CASES
@given(networks(), st.sampled_from([True, False]))
def test_extreme_norms_through_every_connection_equal_brute_force(
    case: tuple[nn.Module, Tensor], largest: bool
) -> None:
    """The dynamic programme against all paths."""
    brute = Brute(*case)
    extreme = max if largest else min
    edges, units = channels.compute_extreme_norms(brute.graph, brute.energy, largest=largest)
    norms_through: dict[object, list[float]] = {}
    for path, value in zip(brute.paths, brute.norms, strict=True):
        for part in (*path.edges, *path.units):
            norms_through.setdefault(part, []).append(value)
    for at, scores in zip(brute.graph.layers, edges, strict=True):
        for index in np.ndindex(*scores.shape):
            key = (at, *index) if len(index) == 2 else (at, *index, None)
            assert float(scores[index]) == pytest.approx(extreme(norms_through[key]), rel=1e-12)
    for at, scores in enumerate(units):
        for channel, score in enumerate(scores.tolist()):
            expected = norms_through.get((at, channel))
            assert score == pytest.approx(extreme(expected), rel=1e-12) if expected else math.isinf(score)


@pytest.mark.slow
@CASES
@given(networks(), st.floats(0.01, 0.99), st.sampled_from(["positive", "negative"]))
def test_selection_by_rate_equals_brute_force(
    case: tuple[nn.Module, Tensor], rate: float, selection: Selection
) -> None:
    """Exactly k paths are selected; among ties, any subset of the tied paths is accepted."""
    brute = Brute(*case)
    norms = channels.list_norms(brute.graph, brute.energy)[-1]
    existing = norms > -math.inf
    k = math.ceil(rate * len(brute.paths) - 1e-9)
    groups = ChannelGroups(brute.layout, brute.graph)
    selected = groups.select_by_rate(case[1], rate, selection, DRAW)
    threshold_norm = np.sort(brute.norms)[::-1][k - 1]
    certain, candidates = brute.norms > threshold_norm * (1 + 1e-12), brute.norms >= threshold_norm * (1 - 1e-12)
    if candidates.sum() == k:  # no tie at the limit: the choice is unique
        edges, _ = brute.traversed(candidates)
        if selection == "negative":
            edges -= brute.traversed(~candidates)[0]
        assert _edges_of(brute, selected.bits) == edges
    else:
        required, allowed = brute.traversed(certain)[0], brute.traversed(candidates)[0]
        if selection == "negative":
            required, allowed = required - brute.traversed(~certain)[0], allowed - brute.traversed(~candidates)[0]
        assert required <= _edges_of(brute, selected.bits) <= allowed
    assert int(existing.sum()) == len(brute.paths)


def _edges_of(brute: Brute, bits: Tensor) -> set[object]:
    """Return the connections whose entries are all selected; none may be selected in part."""
    selected: list[Tensor] = []
    tensors = brute.layout.unflatten(bits)
    for at, energy in zip(brute.graph.layers, brute.energy, strict=True):
        layer = brute.graph.values[at]
        assert isinstance(layer, Weighted)
        parts = tensors[f"{layer.module}.weight"].reshape(energy.numel(), -1)
        assert torch.equal(parts.any(1), parts.all(1))
        selected.append(parts.all(1).view(energy.shape))
    return as_sets(brute.graph, selected, [])[0]


@pytest.mark.slow
@CASES
@given(networks(), st.floats(0.05, 0.95), st.sampled_from(["positive", "negative"]))
def test_threshold_selects_the_same_as_listing(
    case: tuple[nn.Module, Tensor], rate: float, selection: Selection
) -> None:
    """With the exact threshold and without ties, the dynamic programme selects the same as the list."""
    brute = Brute(*case)
    k = math.ceil(rate * len(brute.paths) - 1e-9)
    ordered = np.sort(brute.norms)[::-1]
    if k < len(ordered) and ordered[k] >= ordered[k - 1] * (1 - 1e-9):
        return  # a tie at the limit
    threshold = ordered[k - 1] * (1 - 1e-12)
    largest, _ = channels.compute_extreme_norms(brute.graph, brute.energy, largest=True)
    smallest, _ = channels.compute_extreme_norms(brute.graph, brute.energy, largest=False)
    kept = [e >= threshold for e in (largest if selection == "positive" else smallest)]
    listed = ChannelGroups(brute.layout, brute.graph).select_by_rate(case[1], rate, selection, DRAW)
    assert as_sets(brute.graph, kept, [])[0] == _edges_of(brute, listed.bits)


@pytest.mark.parametrize("network", [stack([3, 4, 3, 2]), Residual(2, 1, 2)])
def test_sampled_paths_are_uniform(network: nn.Module) -> None:
    """Each path has its own norm, and is drawn with frequency 1 / M (chi-squared, 5 standard errors)."""
    size = Layout.from_module(network).size
    brute = Brute(network, torch.randn(size, generator=torch.Generator().manual_seed(3)))
    number = 200_000
    sample = sample_norms(brute.graph, brute.energy, number, torch.Generator().manual_seed(4))
    order = np.argsort(brute.norms)
    positions = np.searchsorted(brute.norms[order], sample.numpy() * (1 - 1e-9))
    counts = np.bincount(positions, minlength=len(order))
    assert counts.sum() == number
    expected = number / len(order)
    chi = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(order) - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


def test_sampled_threshold_selects_the_stated_share_of_paths() -> None:
    """The share is within three standard errors, and the same seed gives the same mask."""
    network = stack([5, 20, 20, 20, 1])
    layout = Layout.from_module(network)
    delta = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    sampled = ChannelGroups(layout, build_channel_graph(layout), max_listed=10, sample_size=10_000)
    assert not sampled.is_exact
    assert "10,000 channels drawn at random" in sampled.threshold_description
    masks = [sampled.select_by_rate(delta, 0.2, "positive", torch.Generator().manual_seed(7)) for _ in range(2)]
    assert masks[0] == masks[1]
    exact = ChannelGroups(layout, build_channel_graph(layout))
    error = 3 * math.sqrt(0.2 * 0.8 / 10_000)
    low, high = (exact.select_by_rate(delta, 0.2 + sign * error, "positive", DRAW) for sign in (-1, 1))
    assert low <= masks[0] <= high


def test_norms_and_selections_of_the_worked_example() -> None:
    """docs/algorithms.md, section 8, vector 13: m_0 = 2, layers (2, 2, 1), in the paper's orientation."""
    network = stack([2, 2, 2, 1])
    layout = Layout.from_module(network)
    tensors = {entry.name: torch.zeros(entry.shape) for entry in layout.tensors}
    tensors["0.weight"] = torch.tensor([[1.0, 0], [1, 2]]).T
    tensors["2.weight"] = torch.tensor([[1.0, 0], [0, 3]]).T
    tensors["4.weight"] = torch.tensor([[0.0], [1]]).T
    delta = layout.flatten(tensors)
    graph = build_channel_graph(layout)
    energy = channels.compute_energies(graph, layout, delta)
    assert energy[0].tolist() == [2, 4]
    assert energy[1].T.tolist() == [[1, 0], [0, 9]]
    assert energy[2].T.tolist() == [[0], [1]]
    assert channels.list_norms(graph, energy)[-1].view(2, 2, 1)[:, :, 0].tolist() == [[3, 3], [4, 14]]

    def select_weights(rate: float, selection: Selection) -> dict[str, list[list[bool]]]:
        groups = ChannelGroups(layout, graph, "never")
        named = layout.unflatten(groups.select_by_rate(delta, rate, selection, DRAW).bits)
        return {name: tensor.T.tolist() for name, tensor in named.items() if name.endswith("weight")}

    one = select_weights(0.25, "positive")
    assert one == {
        "0.weight": [[False, True]] * 2,
        "2.weight": [[False, False], [False, True]],
        "4.weight": [[False], [True]],
    }
    two = select_weights(0.5, "positive")
    assert two == {
        "0.weight": [[False, True]] * 2,
        "2.weight": [[False, False], [True, True]],
        "4.weight": [[True], [True]],
    }
    negative = select_weights(0.5, "negative")
    assert negative == {
        "0.weight": [[False, True]] * 2,
        "2.weight": [[False, False], [True, True]],
        "4.weight": [[False], [False]],
    }
