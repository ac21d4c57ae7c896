"""Removal of units: the smaller network, its vector and the mask (docs/algorithms.md, section 3.8)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases
from torch import Tensor, nn

from flare_sparse.compute.structure.graph import build_channel_graph
from flare_sparse.compute.structure.removal import (
    build_live_mask,
    find_removable_layers,
    get_kept_units,
    narrow_network,
)
from flare_sparse.core.errors import SelectionError
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.tasks.models import build_model
from flare_sparse.training.flat import FlatModel

NETWORKS: dict[str, tuple[nn.Module, Tensor]] = {
    "mlp": (build_model("mlp", features=10, hidden=(7, 5)), torch.randn(4, 10)),
    "image_cnn": (build_model("image_cnn", image=(1, 8, 8), channels=(4, 6)), torch.randn(4, 1, 8, 8)),
    "resnet32": (build_model("resnet32", image=(3, 8, 8)), torch.randn(2, 3, 8, 8)),
    "alexnet3d": (build_model("alexnet3d", volume=(69, 69, 69)), torch.randn(2, 1, 69, 69, 69)),
    "brain_age_cnn_3mm": (build_model("brain_age_cnn_3mm", volume=(16, 16, 16)), torch.randn(2, 1, 16, 16, 16)),
}


def units(name: str, seed: int) -> tuple[Layout, Mask, list[Tensor]]:
    """Draw units to keep at random, at least one in every layer."""
    layout = Layout.from_module(NETWORKS[name][0])
    random = torch.Generator().manual_seed(seed)
    layers = find_removable_layers(build_channel_graph(layout))
    kept = [torch.rand(layer.units, generator=random) < 0.6 for layer in layers]
    for layer in kept:
        layer[int(torch.randint(len(layer), (1,), generator=random))] = True
    return layout, build_live_mask(layout, layers, kept), kept


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_smaller_network_computes_the_same_as_the_masked_one(name: str) -> None:
    """docs/algorithms.md, section 3.11, invariant 9."""
    layout, live, _ = units(name, 1)
    network, inputs = NETWORKS[name]
    smaller = narrow_network(network, live)
    small = Layout.from_module(smaller)
    assert small.size == live.count < layout.size
    weights = torch.randn(layout.size, generator=torch.Generator().manual_seed(2)) * 0.1
    named = layout.unflatten(weights)
    for entry in layout.tensors:
        if entry.name.endswith("running_var"):
            named[entry.name].abs_().add_(1)
    masked, removed = FlatModel(narrow_network(network, Mask.full(layout.size)), layout), FlatModel(smaller, small)
    masked.load(weights * live.bits)
    removed.load(live.take(weights))
    with torch.no_grad():
        expected, result = masked.module.eval()(inputs), removed.module.eval()(inputs)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.cat([removed.flat, removed.collect_buffers()]), live.take(weights))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_extracted_network_has_the_weights_of_the_masked_one(name: str) -> None:
    network, inputs = NETWORKS[name]
    _, live, _ = units(name, 4)
    whole = FlatModel(narrow_network(network, Mask.full(live.size)), Layout.from_module(network))
    vector = Layout.from_module(network).flatten({**dict(network.named_parameters()), **dict(network.named_buffers())})
    whole.load(vector * live.bits)
    with torch.no_grad():
        result = narrow_network(whole.module, live).eval()(inputs)
        torch.testing.assert_close(result, whole.module.eval()(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=count_cases(20), deadline=None)
@given(seed=st.integers(0, 2**20))
def test_live_mask_and_kept_units_are_inverse(name: str, seed: int) -> None:
    layout, live, kept = units(name, seed)
    result = get_kept_units(layout, find_removable_layers(build_channel_graph(layout)), live)
    assert all(torch.equal(a, b) for a, b in zip(result, kept, strict=True))


def test_residual_streams_and_outputs_are_not_removable() -> None:
    result = find_removable_layers(build_channel_graph(Layout.from_module(build_model("resnet32"))))
    assert [layer.module.split(".")[1] for layer in result] == ["first"] * 15


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 4), nn.LayerNorm([4, 6, 6]), nn.Identity()], ids=["group", "layer", "no ReLU"]
)
def test_layers_with_mixing_norms_or_without_relu_are_not_removable(norm: nn.Module) -> None:
    active = nn.Identity() if isinstance(norm, nn.Identity) else nn.ReLU()
    network = nn.Sequential(nn.Conv2d(1, 4, 3), norm, active, nn.Flatten(), nn.Linear(144, 1))
    assert find_removable_layers(build_channel_graph(Layout.from_module(network))) == ()


def test_mask_of_single_entries_has_no_smaller_network() -> None:
    network, _ = NETWORKS["mlp"]
    bits = torch.ones(Layout.from_module(network).size, dtype=torch.bool)
    bits[3] = False
    with pytest.raises(SelectionError, match="does not consist of complete units"):
        narrow_network(network, Mask(bits))
