"""APoZ: shares of the sites, their mean, and removal of units (docs/algorithms.md, section 3.8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flare_sparse.compute.structure.graph import build_channel_graph
from flare_sparse.compute.structure.removal import build_live_mask, find_removable_layers, get_kept_units
from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.params import Layout
from flare_sparse.methods.registry import METHODS, Method
from flare_sparse.methods.support.unit_pruning import COUNT, measure_apoz, remove_idle_units
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


def test_mean_of_sites_is_the_apoz_of_the_pooled_examples() -> None:
    """docs/algorithms.md, section 3.11, invariant 8."""
    parts = [pictures(5, 1), pictures(18, 2), pictures(1, 3)]
    shares = torch.stack([measure_apoz(site(part), WEIGHTS, LAYERS) for part in parts])
    pooled = torch.tensor([5.0, 18, 1]) @ shares / 24
    tensors = LAYOUT.unflatten(WEIGHTS)
    with torch.no_grad():
        x = torch.cat(parts)
        hidden = torch.relu(nn.functional.conv2d(x, tensors["0.weight"], tensors["0.bias"]))
        last = torch.relu(hidden.flatten(1) @ tensors["4.weight"].T + tensors["4.bias"])
    expected = torch.cat([(hidden == 0).float().mean((0, 2, 3)), (last == 0).float().mean(0)])
    torch.testing.assert_close(measure_apoz(site(x), WEIGHTS, LAYERS), expected)
    torch.testing.assert_close(pooled, expected)
    assert bool((pooled <= 1).all())


def build_method() -> Method[Any, Any]:
    return METHODS["fawp"](METHODS["fawp"].Config.model_validate({"pruning_rate": 0.3}), LAYOUT, 1)


def test_units_idle_at_all_sites_together_are_removed() -> None:
    """docs/algorithms.md, section 8, vector 16: shares of 3 / 4 of 4 examples and 1 / 6 of 6 are 0.4 of all."""
    method = build_method()
    state = replace(method.init(WEIGHTS, ["a", "b"]), round=2, phase=COUNT)
    mask = method.ask(state, ["a"])["a"].expected.mask
    assert mask.count == 8
    # Units 0 and 1 of the second layer are above 0.4, unit 2 is at it, the other units are below.
    first, second = torch.zeros(8), torch.zeros(8)
    first[3:6], second[3:6] = torch.tensor([1.0, 0.0, 0.75]), torch.tensor([0.5, 0.7, 1 / 6])
    sites = [Contribution("a", Patch(first, mask), "scores", 4), Contribution("b", Patch(second, mask), "scores", 6)]
    after = method.learn(state, sites)
    assert [part.tolist() for part in get_kept_units(LAYOUT, LAYERS, after.live)] == [
        [True] * 3,
        [False, False, True, True, True],
    ]


@pytest.mark.parametrize(("share", "is_valid"), [(0.0, True), (1.0, True), (1.01, False), (float("nan"), False)])
def test_impossible_shares_are_refused(share: float, is_valid: bool) -> None:
    method = build_method()
    expected = method.ask(replace(method.init(WEIGHTS, ["a"]), round=2, phase=COUNT), ["a"])["a"].expected
    assert expected.min_value == 0
    assert expected.is_valid(Patch(torch.full((8,), share), expected.mask), 4) == is_valid


def test_site_without_examples_has_no_zeros() -> None:
    assert not measure_apoz(site(pictures(0, 1)), WEIGHTS, LAYERS).any()


def test_removing_a_unit_that_is_never_active_keeps_the_outputs() -> None:
    """docs/algorithms.md, section 3.11, invariant 8."""
    weights = WEIGHTS.clone()
    named = LAYOUT.unflatten(weights)
    named["4.weight"][2] = 0
    named["4.bias"][2] = -1
    local_site = site(pictures(12, 4))
    assert measure_apoz(local_site, weights, LAYERS)[3 + 2] == 1
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
    share = [0.3, 0.9, 0.3, 0.9, 1.0, 0.3, 0.1]
    remaining = remove_idle_units(kept, share, 3, at_least=0.0)
    assert [part.tolist() for part in remaining] == [[False, False, True], [False, False, True, True]]


def test_every_layer_keeps_its_minimum() -> None:
    kept = [torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)]
    share = [1.0] * 4 + [0.0] * 4
    remaining = remove_idle_units(kept, share, 6, at_least=0.5)
    assert [int(part.sum()) for part in remaining] == [2, 2]
    one = remove_idle_units(kept, share, 8, at_least=0.0)
    assert [int(part.sum()) for part in one] == [1, 1]
