"""Channel norms and selections against brute force: every path is written down and looked at (ALGORITHMS 2.1, 2.6)."""

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
from torch import Tensor, nn

from flare_sparse.params import Layout
from flare_sparse.scores.scbf import paths as channels
from flare_sparse.scores.scbf.groups import Selection
from flare_sparse.scores.scbf.sampling import compute_log_path_counts, sample_norms
from flare_sparse.scores.scbf.selection import ChannelGroups
from flare_sparse.structure import build_channel_graph
from flare_sparse.structure.graph import ChannelGraph
from flare_sparse.structure.nodes import Concat, Pad, Source, Sum, Weighted

DRAW = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Path:
    """One channel: the connections (layer, output, input; no input where it reads the network's input), the units."""

    edges: tuple[tuple[int, int, int | None], ...]
    units: tuple[tuple[int, int], ...]


def paths(graph: ChannelGraph, at: int, channel: int) -> Iterator[Path]:
    """All ways from the input to a channel of a value, by plain recursion."""
    value = graph.values[at]
    here = (at, channel)
    if isinstance(value, Source) or value.channels == 0:
        return
    if isinstance(value, Weighted):
        if graph.reads_input(at):
            yield Path(((at, channel, None),), (here,))
            return
        width = graph.values[value.inputs[0]].channels // value.groups
        group = channel // (value.channels // value.groups)
        for i in range(width):
            for path in paths(graph, value.inputs[0], group * width + i):
                yield Path((*path.edges, (at, channel, i)), (*path.units, here))
        return
    offset = value.before if isinstance(value, Pad) else 0
    for before in value.inputs:
        inside = channel - offset
        if 0 <= inside < graph.values[before].channels:
            for path in paths(graph, before, inside):
                yield Path(path.edges, (*path.units, here))
        offset += graph.values[before].channels if isinstance(value, Concat) else 0
        if isinstance(value, Sum):
            offset = 0


def norm(graph: ChannelGraph, path: Path, energy: list[Tensor]) -> float:
    place = {at: n for n, at in enumerate(graph.layers)}
    return sum(float(energy[place[at]][out] if i is None else energy[place[at]][out, i]) for at, out, i in path.edges)


class Brute:
    """All channels of a network and their norms."""

    def __init__(self, network: nn.Module, change: Tensor):
        self.layout = Layout.from_module(network)
        self.graph = build_channel_graph(self.layout)
        self.energy = channels.compute_energies(self.graph, self.layout, change)
        output = self.graph.values[self.graph.output]
        self.paths = [p for j in range(output.channels) for p in paths(self.graph, self.graph.output, j)]
        self.norms = np.array([norm(self.graph, path, self.energy) for path in self.paths])

    def touched(self, chosen: np.ndarray) -> tuple[set[object], set[object]]:
        picked = [path for path, take in zip(self.paths, chosen, strict=True) if take]
        return {e for p in picked for e in p.edges}, {u for p in picked for u in p.units}


def as_sets(graph: ChannelGraph, edges: list[Tensor], units: list[Tensor]) -> tuple[set[object], set[object]]:
    found: set[object] = set()
    for at, mask in zip(graph.layers, edges, strict=True):
        if mask.dim() == 1:
            found |= {(at, int(o), None) for o in torch.nonzero(mask).flatten()}
        else:
            found |= {(at, int(o), int(i)) for o, i in torch.nonzero(mask)}
    return found, {(at, int(c)) for at, mask in enumerate(units) for c in torch.nonzero(mask).flatten()}


class Residual(nn.Module):
    """A residual sum, a grouped convolution, a concatenation and a shortcut with new channels."""

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
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A stack or a residual net, with a change of whole numbers (ties) or of reals."""
    if draw(st.booleans()):
        network = stack([draw(st.integers(1, 4)) for _ in range(draw(st.integers(2, 5)))])
    else:
        network = Residual(draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = Layout.from_module(network).size
    whole = torch.randint(-2, 3, (size,), generator=random).float()
    return network, whole if draw(st.booleans()) else torch.randn(size, generator=random)


CASES = settings(max_examples=150, deadline=None)


@CASES
@given(networks())
def test_listed_norms_are_those_of_brute_force(case: tuple[nn.Module, Tensor]) -> None:
    brute = Brute(*case)
    norms = channels.list_norms(brute.graph, brute.energy)
    there = norms[norms > -math.inf]
    np.testing.assert_allclose(np.sort(there.numpy()), np.sort(brute.norms), rtol=1e-12)
    counted = float(torch.logsumexp(compute_log_path_counts(brute.graph)[brute.graph.output], 0))
    assert round(math.exp(counted)) == len(brute.paths)


@CASES
@given(networks(), st.sampled_from([True, False]))
def test_1_best_and_worst_channel_through_every_connection(case: tuple[nn.Module, Tensor], best: bool) -> None:
    """The dynamic programme against a look at every path."""
    brute = Brute(*case)
    extreme = max if best else min
    edges, units = channels.compute_norms_through(brute.graph, brute.energy, best=best)
    compute_norms_through: dict[object, list[float]] = {}
    for path, value in zip(brute.paths, brute.norms, strict=True):
        for part in (*path.edges, *path.units):
            compute_norms_through.setdefault(part, []).append(value)
    for at, scores in zip(brute.graph.layers, edges, strict=True):
        for index in np.ndindex(*scores.shape):
            key = (at, *index) if len(index) == 2 else (at, *index, None)
            assert float(scores[index]) == pytest.approx(extreme(compute_norms_through[key]), rel=1e-12)
    for at, scores in enumerate(units):
        for channel, score in enumerate(scores.tolist()):
            expected = compute_norms_through.get((at, channel))
            assert score == pytest.approx(extreme(expected), rel=1e-12) if expected else math.isinf(score)


@CASES
@given(networks(), st.floats(0.01, 0.99), st.sampled_from(["positive", "negative"]))
def test_1_selection_equals_brute_force(case: tuple[nn.Module, Tensor], rate: float, selection: Selection) -> None:
    """Exactly k channels, ties included: what the listing chooses is put back as paths and looked up."""
    brute = Brute(*case)
    norms = channels.list_norms(brute.graph, brute.energy)
    there = norms > -math.inf
    k = math.ceil(rate * len(brute.paths) - 1e-9)
    groups = ChannelGroups(brute.layout, brute.graph)
    found = groups.select_by_rate(case[1], rate, selection, DRAW)
    limit = np.sort(brute.norms)[::-1][k - 1]
    sure, possible = brute.norms > limit * (1 + 1e-12), brute.norms >= limit * (1 - 1e-12)
    if possible.sum() == k:  # no tie at the limit: the choice is unique
        edges, _ = brute.touched(possible)
        if selection == "negative":
            edges -= brute.touched(~possible)[0]
        assert _edges_of(brute, found.bits) == edges
    else:
        some, most = brute.touched(sure)[0], brute.touched(possible)[0]
        if selection == "negative":
            some, most = some - brute.touched(~sure)[0], most - brute.touched(~possible)[0]
        assert some <= _edges_of(brute, found.bits) <= most
    assert int(there.sum()) == len(brute.paths)


def _edges_of(brute: Brute, on: Tensor) -> set[object]:
    """The connections whose entries are all on; none may be on in part."""
    found: list[Tensor] = []
    tensors = brute.layout.unflatten(on)
    for at, energy in zip(brute.graph.layers, brute.energy, strict=True):
        layer = brute.graph.values[at]
        assert isinstance(layer, Weighted)
        parts = tensors[f"{layer.module}.weight"].reshape(energy.numel(), -1)
        assert torch.equal(parts.any(1), parts.all(1))
        found.append(parts.all(1).view(energy.shape))
    return as_sets(brute.graph, found, [])[0]


@CASES
@given(networks(), st.floats(0.05, 0.95), st.sampled_from(["positive", "negative"]))
def test_1_the_threshold_of_a_large_net_selects_what_listing_selects(
    case: tuple[nn.Module, Tensor], rate: float, selection: Selection
) -> None:
    """With the exact threshold, the dynamic programme selects what the list does, where nothing is tied."""
    brute = Brute(*case)
    k = math.ceil(rate * len(brute.paths) - 1e-9)
    ordered = np.sort(brute.norms)[::-1]
    if k < len(ordered) and ordered[k] >= ordered[k - 1] * (1 - 1e-9):
        return  # a tie at the limit
    threshold = ordered[k - 1] * (1 - 1e-12)
    best, _ = channels.compute_norms_through(brute.graph, brute.energy, best=True)
    worst, _ = channels.compute_norms_through(brute.graph, brute.energy, best=False)
    kept = [e >= threshold for e in (best if selection == "positive" else worst)]
    listed = ChannelGroups(brute.layout, brute.graph).select_by_rate(case[1], rate, selection, DRAW)
    assert as_sets(brute.graph, kept, [])[0] == _edges_of(brute, listed.bits)


@pytest.mark.parametrize("network", [stack([3, 4, 3, 2]), Residual(2, 1, 2)])
def test_drawn_channels_are_uniform(network: nn.Module) -> None:
    """Every channel's norm made different: how often each is drawn follows 1 / M (chi-squared, 5 standard errors)."""
    size = Layout.from_module(network).size
    brute = Brute(network, torch.randn(size, generator=torch.Generator().manual_seed(3)))
    number = 200_000
    sample = sample_norms(brute.graph, brute.energy, number, torch.Generator().manual_seed(4))
    order = np.argsort(brute.norms)
    place = np.searchsorted(brute.norms[order], sample.numpy() * (1 - 1e-9))
    counts = np.bincount(place, minlength=len(order))
    assert counts.sum() == number
    expected = number / len(order)
    chi = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(order) - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


def test_a_sampled_threshold_selects_the_stated_share_of_channels() -> None:
    """Three standard errors of the quantile, and seeded: the same draw, the same mask."""
    network = stack([5, 20, 20, 20, 1])
    layout = Layout.from_module(network)
    change = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    sampled = ChannelGroups(layout, build_channel_graph(layout), list_up_to=10, drawn=10_000)
    assert not sampled.exact
    assert "10,000 channels drawn at random" in sampled.threshold
    masks = [sampled.select_by_rate(change, 0.2, "positive", torch.Generator().manual_seed(7)) for _ in range(2)]
    assert masks[0] == masks[1]
    exact = ChannelGroups(layout, build_channel_graph(layout))
    error = 3 * math.sqrt(0.2 * 0.8 / 10_000)
    low, high = (exact.select_by_rate(change, 0.2 + sign * error, "positive", DRAW) for sign in (-1, 1))
    assert low <= masks[0] <= high


def test_vector_13_of_the_specification() -> None:
    """m_0 = 2, layers (2, 2, 1), paper orientation in ALGORITHMS section 7."""
    network = stack([2, 2, 2, 1])
    layout = Layout.from_module(network)
    tensors = {entry.name: torch.zeros(entry.shape) for entry in layout.tensors}
    tensors["0.weight"] = torch.tensor([[1.0, 0], [1, 2]]).T
    tensors["2.weight"] = torch.tensor([[1.0, 0], [0, 3]]).T
    tensors["4.weight"] = torch.tensor([[0.0], [1]]).T
    change = layout.flatten(tensors)
    graph = build_channel_graph(layout)
    energy = channels.compute_energies(graph, layout, change)
    assert energy[0].tolist() == [2, 4]
    assert energy[1].T.tolist() == [[1, 0], [0, 9]]
    assert energy[2].T.tolist() == [[0], [1]]
    assert channels.list_norms(graph, energy).view(2, 2, 1)[:, :, 0].tolist() == [[3, 3], [4, 14]]

    def on(rate: float, selection: Selection) -> dict[str, list[list[bool]]]:
        groups = ChannelGroups(layout, graph, "never")
        named = layout.unflatten(groups.select_by_rate(change, rate, selection, DRAW).bits)
        return {name: tensor.T.tolist() for name, tensor in named.items() if name.endswith("weight")}

    one = on(0.25, "positive")
    assert one == {
        "0.weight": [[False, True]] * 2,
        "2.weight": [[False, False], [False, True]],
        "4.weight": [[False], [True]],
    }
    two = on(0.5, "positive")
    assert two == {
        "0.weight": [[False, True]] * 2,
        "2.weight": [[False, False], [True, True]],
        "4.weight": [[True], [True]],
    }
    negative = on(0.5, "negative")
    assert negative == {
        "0.weight": [[False, True]] * 2,
        "2.weight": [[False, False], [True, True]],
        "4.weight": [[False], [False]],
    }
