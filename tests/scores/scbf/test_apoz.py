"""APoZ: counted at the sites, pooled exactly, and which units go (ALGORITHMS 2.1, 2.6 invariant 8)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flare_sparse.errors import ConfigError
from flare_sparse.exchange import Contribution
from flare_sparse.federation.rules import cap_contributions
from flare_sparse.params import Layout
from flare_sparse.scores.scbf.apoz import WHOLE, count_zeros, encode_counts, locate_counts, pool_apoz, remove_idle_units
from flare_sparse.structure import build_channel_graph, build_live_mask, find_removable_layers
from flare_sparse.task import Examples, Metric, SiteData, Task
from flare_sparse.training import Site


class Pictures(Task):
    """A small convolutional network with dropout on random pictures."""

    metric = Metric("mse", "", "min")

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(48, 5), nn.ReLU(), nn.Linear(5, 1)
        )

    def load(self, data: SiteData, seed: int) -> Examples:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), batch[1]

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        return {"mse": 0.0}


LAYOUT = Layout.from_module(Pictures().model())
LAYERS = find_removable_layers(build_channel_graph(LAYOUT))
WEIGHTS = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(3)) * 0.3


def site(pictures: Tensor) -> Site:
    data = TensorDataset(pictures, torch.zeros(len(pictures), 1))
    return Site("site-1", Pictures(), Examples(data, data), LAYOUT, 0)


def pictures(count: int, seed: int) -> Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def update(where: Site, name: str) -> Contribution:
    at = locate_counts(LAYOUT, LAYERS)
    return Contribution(
        name, encode_counts(count_zeros(where, WEIGHTS, LAYERS), at, LAYOUT.size), "scores", where.num_examples, {}
    )


def test_8_counts_of_the_sites_make_the_apoz_of_the_pooled_examples_exactly() -> None:
    parts = [pictures(5, 1), pictures(18, 2), pictures(1, 3)]
    at = locate_counts(LAYOUT, LAYERS)
    found = pool_apoz([update(site(part), f"site-{i}") for i, part in enumerate(parts)], at)
    assert found == pool_apoz([update(site(torch.cat(parts)), "all")], at)
    tensors = LAYOUT.unflatten(WEIGHTS)
    with torch.no_grad():
        x = torch.cat(parts)
        hidden = torch.relu(nn.functional.conv2d(x, tensors["0.weight"], tensors["0.bias"]))
        last = torch.relu(hidden.flatten(1) @ tensors["4.weight"].T + tensors["4.bias"])
    expected = [Fraction(int((hidden[:, c] == 0).sum()), 24 * 16) for c in range(3)]
    expected += [Fraction(int((last[:, c] == 0).sum()), 24) for c in range(5)]
    assert found == expected
    assert all(0 <= share <= 1 for share in found)


def test_vector_16() -> None:
    """One neuron over four examples, and two clients with (zeros, total) of (3, 4) and (1, 6)."""
    at = torch.tensor([[0, 1, 2]])

    def said(zeros: int, examples: int, name: str) -> Contribution:
        return Contribution(name, encode_counts(torch.tensor([[zeros, 1]]), at, 3), "scores", examples, {})

    assert pool_apoz([said(3, 4, "a")], at) == [Fraction(3, 4)]
    assert pool_apoz([said(3, 4, "a"), said(1, 6, "b")], at) == [Fraction(4, 10)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_counts_beyond_what_float32_holds_arrive_whole(zeros: int, positions: int) -> None:
    at = torch.tensor([[0, 2, 4]])
    examples = -(-max(zeros, 1) // positions)
    sent = Contribution("a", encode_counts(torch.tensor([[zeros, positions]]), at, 5), "scores", examples, {})
    assert pool_apoz([sent], at) == [Fraction(zeros, positions * examples)]


def test_a_site_that_counts_with_fewer_examples_than_it_has_keeps_its_share_of_zeros() -> None:
    at = torch.tensor([[0, 1, 2]])
    sites = [
        Contribution(s, encode_counts(torch.tensor([[z, 1]]), at, 3), "scores", n, {})
        for z, n, s in ((100, 1000, "a"), (50, 100, "b"))
    ]
    cut, _ = cap_contributions(sites, 0.5)
    assert [u.num_examples for u in cut] == [100, 100]
    assert pool_apoz(cut, at) == [(Fraction(1, 10) + Fraction(1, 2)) / 2]


def test_outputs_that_a_site_claims_give_it_no_weight() -> None:
    at = torch.tensor([[0, 1, 2]])
    sites = [
        Contribution(s, encode_counts(torch.tensor([[z, each]]), at, 3), "scores", 10, {})
        for z, each, s in ((0, 4, "a"), (10**12, 10**11, "b"))
    ]
    assert pool_apoz(sites, at) == [Fraction(1, 2)]


def test_what_is_claimed_beyond_what_is_possible_is_cut_off() -> None:
    at = torch.tensor([[0, 1, 2]])
    vector = torch.tensor([5.0 * WHOLE, -3.0, 7.0])
    patch = encode_counts(torch.tensor([[1, 1]]), at, 3)
    assert pool_apoz([Contribution("a", type(patch).from_vector(vector, patch.mask), "scores", 10, {})], at) == [
        Fraction(1)
    ]
    assert pool_apoz([], at) == [Fraction(0)]


def test_8_a_unit_that_is_never_active_can_go_without_a_trace() -> None:
    weights = WEIGHTS.clone()
    named = LAYOUT.unflatten(weights)
    named["4.weight"][2] = 0
    named["4.bias"][2] = -1
    where = site(pictures(12, 4))
    at = locate_counts(LAYOUT, LAYERS)
    counts = count_zeros(where, weights, LAYERS)
    share = pool_apoz([Contribution("a", encode_counts(counts, at, LAYOUT.size), "scores", 12, {})], at)
    assert share[3 + 2] == 1
    kept = [torch.ones(3, dtype=torch.bool), torch.tensor([True, True, False, True, True])]
    live = build_live_mask(LAYOUT, LAYERS, kept)
    where.weights = weights
    small = where.narrow(live)
    whole, masked, removed = (
        outputs(where, weights),
        outputs(where, weights * live.bits),
        outputs(small, small.weights),
    )
    assert torch.equal(whole, masked)
    torch.testing.assert_close(removed, whole, rtol=1e-5, atol=1e-6)


def outputs(where: Site, weights: Tensor) -> Tensor:
    """What the last layer gives on all training examples."""
    found: list[Tensor] = []
    where.observe_units(weights, ["_6"], lambda _, output: found.append(output))
    return torch.cat(found)


def test_units_go_by_apoz_then_layer_then_index() -> None:
    kept = [torch.tensor([True, True, True]), torch.tensor([True, False, True, True])]
    share = [Fraction(n, 10) for n in (3, 9, 3, 9, 10, 3, 1)]
    left = remove_idle_units(kept, share, 3, at_least=0.0, per_layer=False)
    assert [part.tolist() for part in left] == [[False, False, True], [False, False, True, True]]


def test_every_layer_keeps_its_least() -> None:
    kept = [torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)]
    share = [Fraction(1)] * 4 + [Fraction(0)] * 4
    left = remove_idle_units(kept, share, 6, at_least=0.5, per_layer=False)
    assert [int(part.sum()) for part in left] == [2, 2]
    one = remove_idle_units(kept, share, 8, at_least=0.0, per_layer=False)
    assert [int(part.sum()) for part in one] == [1, 1]


def test_a_ranking_for_each_layer_takes_from_each_its_share() -> None:
    kept = [torch.ones(12, dtype=torch.bool), torch.ones(4, dtype=torch.bool)]
    share = [Fraction(1)] * 12 + [Fraction(0)] * 4
    left = remove_idle_units(kept, share, 4, at_least=0.0, per_layer=True)
    assert [int(part.sum()) for part in left] == [9, 3]


def test_a_unit_with_too_few_entries_for_its_count_is_refused() -> None:
    thin = Layout.from_module(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)))
    with pytest.raises(ConfigError, match="three weights of their own"):
        locate_counts(thin, find_removable_layers(build_channel_graph(thin)))
