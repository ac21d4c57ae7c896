"""APoZ: counts of the sites, exact pooling, and removal of units (docs/algorithms.md, section 3.8)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flare_sparse.compute.structure.graph import build_channel_graph
from flare_sparse.compute.structure.removal import build_live_mask, find_removable_layers
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.exchange import Contribution
from flare_sparse.core.params import Layout
from flare_sparse.methods.support.unit_pruning import (
    MAX_EXACT_INTEGER,
    count_zeros,
    encode_counts,
    locate_counts,
    pool_apoz,
    remove_idle_units,
)
from flare_sparse.rounds.federation.rules import cap_contributions
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task
from flare_sparse.training import LocalTask, Site, build_site


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
    return build_site(LocalTask.open("site-1", Pictures(), Examples(data, data), LAYOUT, 0))


def pictures(count: int, seed: int) -> Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


def update(local_site: Site, name: str) -> Contribution:
    positions = locate_counts(LAYOUT, LAYERS)
    return Contribution(
        name,
        encode_counts(count_zeros(local_site, WEIGHTS, LAYERS), positions, LAYOUT.size),
        "scores",
        local_site.num_examples,
        {},
    )


def test_counts_of_sites_give_exactly_the_apoz_of_the_pooled_examples() -> None:
    """docs/algorithms.md, section 3.11, invariant 8."""
    parts = [pictures(5, 1), pictures(18, 2), pictures(1, 3)]
    positions = locate_counts(LAYOUT, LAYERS)
    apoz = pool_apoz([update(site(part), f"site-{i}") for i, part in enumerate(parts)], positions)
    assert apoz == pool_apoz([update(site(torch.cat(parts)), "all")], positions)
    tensors = LAYOUT.unflatten(WEIGHTS)
    with torch.no_grad():
        x = torch.cat(parts)
        hidden = torch.relu(nn.functional.conv2d(x, tensors["0.weight"], tensors["0.bias"]))
        last = torch.relu(hidden.flatten(1) @ tensors["4.weight"].T + tensors["4.bias"])
    expected = [Fraction(int((hidden[:, c] == 0).sum()), 24 * 16) for c in range(3)]
    expected += [Fraction(int((last[:, c] == 0).sum()), 24) for c in range(5)]
    assert apoz == expected
    assert all(0 <= share <= 1 for share in apoz)


def test_apoz_of_the_worked_example() -> None:
    """docs/algorithms.md, section 8, vector 16: two sites with (zeros, total) of (3, 4) and (1, 6)."""
    positions = torch.tensor([[0, 1, 2]])

    def contribute(zeros: int, examples: int, name: str) -> Contribution:
        return Contribution(name, encode_counts(torch.tensor([[zeros, 1]]), positions, 3), "scores", examples, {})

    assert pool_apoz([contribute(3, 4, "a")], positions) == [Fraction(3, 4)]
    assert pool_apoz([contribute(3, 4, "a"), contribute(1, 6, "b")], positions) == [Fraction(4, 10)]


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_counts_beyond_the_integers_of_float32_are_exact(zeros: int, outputs_each: int) -> None:
    positions = torch.tensor([[0, 2, 4]])
    examples = -(-max(zeros, 1) // outputs_each)
    sent = Contribution("a", encode_counts(torch.tensor([[zeros, outputs_each]]), positions, 5), "scores", examples, {})
    assert pool_apoz([sent], positions) == [Fraction(zeros, outputs_each * examples)]


def test_capped_weight_of_a_site_keeps_its_share_of_zeros() -> None:
    positions = torch.tensor([[0, 1, 2]])
    sites = [
        Contribution(s, encode_counts(torch.tensor([[z, 1]]), positions, 3), "scores", n, {})
        for z, n, s in ((100, 1000, "a"), (50, 100, "b"))
    ]
    cut, _ = cap_contributions(sites, 0.5)
    assert [u.num_examples for u in cut] == [100, 100]
    assert pool_apoz(cut, positions) == [(Fraction(1, 10) + Fraction(1, 2)) / 2]


def test_claimed_outputs_give_a_site_no_weight() -> None:
    positions = torch.tensor([[0, 1, 2]])
    sites = [
        Contribution(s, encode_counts(torch.tensor([[z, each]]), positions, 3), "scores", 10, {})
        for z, each, s in ((0, 4, "a"), (10**12, 10**11, "b"))
    ]
    assert pool_apoz(sites, positions) == [Fraction(1, 2)]


def test_impossible_counts_are_clipped() -> None:
    positions = torch.tensor([[0, 1, 2]])
    vector = torch.tensor([5.0 * MAX_EXACT_INTEGER, -3.0, 7.0])
    patch = encode_counts(torch.tensor([[1, 1]]), positions, 3)
    assert pool_apoz([Contribution("a", type(patch).from_vector(vector, patch.mask), "scores", 10, {})], positions) == [
        Fraction(1)
    ]
    assert pool_apoz([], positions) == [Fraction(0)]


def test_removing_a_unit_that_is_never_active_keeps_the_outputs() -> None:
    """docs/algorithms.md, section 3.11, invariant 8."""
    weights = WEIGHTS.clone()
    named = LAYOUT.unflatten(weights)
    named["4.weight"][2] = 0
    named["4.bias"][2] = -1
    local_site = site(pictures(12, 4))
    positions = locate_counts(LAYOUT, LAYERS)
    counts = count_zeros(local_site, weights, LAYERS)
    share = pool_apoz([Contribution("a", encode_counts(counts, positions, LAYOUT.size), "scores", 12, {})], positions)
    assert share[3 + 2] == 1
    kept = [torch.ones(3, dtype=torch.bool), torch.tensor([True, True, False, True, True])]
    live = build_live_mask(LAYOUT, LAYERS, kept)
    local_site.weights = weights
    small = local_site.narrow(live)
    whole, masked, removed = (
        outputs(local_site, weights),
        outputs(local_site, weights * live.bits),
        outputs(small, small.weights),
    )
    assert torch.equal(whole, masked)
    torch.testing.assert_close(removed, whole, rtol=1e-5, atol=1e-6)


def outputs(local_site: Site, weights: Tensor) -> Tensor:
    """Return the outputs of the last layer on all training examples."""
    batches: list[Tensor] = []
    local_site.trainer.observe_units(weights, ["_6"], lambda _, output: batches.append(output))
    return torch.cat(batches)


def test_units_are_removed_by_apoz_then_layer_then_index() -> None:
    kept = [torch.tensor([True, True, True]), torch.tensor([True, False, True, True])]
    share = [Fraction(n, 10) for n in (3, 9, 3, 9, 10, 3, 1)]
    remaining = remove_idle_units(kept, share, 3, at_least=0.0)
    assert [part.tolist() for part in remaining] == [[False, False, True], [False, False, True, True]]


def test_every_layer_keeps_its_minimum() -> None:
    kept = [torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)]
    share = [Fraction(1)] * 4 + [Fraction(0)] * 4
    remaining = remove_idle_units(kept, share, 6, at_least=0.5)
    assert [int(part.sum()) for part in remaining] == [2, 2]
    one = remove_idle_units(kept, share, 8, at_least=0.0)
    assert [int(part.sum()) for part in one] == [1, 1]


def test_units_with_too_few_entries_for_their_counts_raise() -> None:
    thin = Layout.from_module(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)))
    with pytest.raises(ConfigError, match="three weights of their own"):
        locate_counts(thin, find_removable_layers(build_channel_graph(thin)))
