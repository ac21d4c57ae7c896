"""Cost of a prediction: multiply-accumulates counted by hand, of whole, sparse and compact networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flare_sparse.compute.structure.compact import compact_model
from flare_sparse.core.errors import ConfigError
from flare_sparse.results.runs.cost import count_macs, measure_cost


def build_network(dead: int) -> nn.Sequential:
    """Return a convolution of 4 channels and a linear layer, with ``dead`` channels that compute nothing."""
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2)
    )
    with torch.no_grad():
        for tensor in (network[0].weight, network[0].bias, network[1].weight, network[1].bias):
            tensor[:dead] = 0
        network[1].running_mean.normal_()
    return network.eval()


def test_macs_are_those_of_each_product() -> None:
    macs = count_macs(build_network(0), torch.zeros(1, 1, 8, 8))
    assert macs == {"0": 4 * 9 * 64, "4": 256 * 2, "": 4 * 9 * 64 + 256 * 2}


def test_zeros_and_units_that_compute_nothing_cost_nothing() -> None:
    network = build_network(1)
    network[4].weight.data[0, :128] = 0
    cost = measure_cost(network, torch.randn(3, 1, 8, 8))
    assert cost["dense"]["macs"] == 4 * 9 * 64 + 512
    assert cost["sparse"]["macs"] == 3 * 9 * 64 + 384
    assert cost["compact"]["macs"] == 3 * 9 * 64 + 384
    assert all(cost[way]["examples_per_second"] > 0 for way in ("dense", "sparse", "compact"))
    assert measure_cost(build_network(0), torch.randn(1, 1, 8, 8))["not_compact"].startswith("no unit or channel")


@pytest.mark.parametrize("dead", [1, 3, 4])
def test_compact_network_computes_the_same(dead: int) -> None:
    network, x = build_network(dead), torch.randn(5, 1, 8, 8)
    small = compact_model(network)
    assert small[0].weight.shape[0] == max(1, 4 - dead)
    with torch.no_grad():
        assert torch.allclose(small(x), network(x), atol=1e-6)


def test_network_whose_weights_are_scattered_is_not_cut() -> None:
    network = build_network(0)
    network[0].weight.data[0] = 0
    with pytest.raises(ConfigError, match=r"no unit or channel.*scbfwp.*--format sparse"):
        compact_model(network)
