"""Inputs of every size, and modes of single layers, against torch: the same values or the same error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from flare_sparse.compute.kernels import block as block_module
from flare_sparse.compute.kernels import network as network_module
from flare_sparse.compute.kernels.chains import find_chains
from flare_sparse.compute.kernels.cost import Work
from flare_sparse.compute.kernels.network import Block, use_sparse_kernels
from flare_sparse.core.errors import ConfigError


def use_kernels(network: nn.Module) -> Any:
    """Return a context in which kernels compute what they can, with all weights live."""
    live = {name: torch.ones_like(p, dtype=torch.bool) for name, p in network.named_parameters() if p.dim() > 1}
    return use_sparse_kernels(network, live, lambda *_: True)


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (nn.Sequential(nn.Conv3d(2, 4, 3), nn.InstanceNorm3d(4), nn.MaxPool3d(2), nn.ReLU()), (2, 6, 7, 8)),
        (nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4).eval(), nn.ReLU()), (0, 2, 6, 7, 8)),
        (nn.Sequential(nn.Conv3d(2, 4, 3), nn.MaxPool3d(2), nn.ReLU()), (0, 2, 6, 7, 8)),
    ],
)
def test_inputs_without_a_batch_and_without_examples_are_computed_by_torch(
    network: nn.Module, shape: tuple[int, ...]
) -> None:
    inputs = torch.randn(shape)
    expected = network(inputs)
    with use_kernels(network) as blocks:
        assert torch.equal(network(inputs), expected)
        assert not blocks[0].is_sparse


@pytest.mark.parametrize(
    ("network", "shape", "message"),
    [
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2)), (1, 1, 3, 3, 3), "more than 1 value per channel"),
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.InstanceNorm3d(2)), (4, 1, 3, 3, 3), "more than 1 spatial element"),
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.MaxPool3d(4)), (1, 1, 5, 5, 5), "[Oo]utput size is too small"),
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU()), (1, 1, 2, 5, 5), "Kernel size can't be greater"),
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU()), (1, 3, 5, 5, 5), "to have 1 channels, but got 3"),
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.MaxPool2d(2)), (1, 1, 5, 5, 5), r"3D or 4D"),
        (nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(4)), (1, 1, 5, 5, 5), "should contain"),
    ],
)
def test_inputs_that_torch_rejects_raise_its_error(network: nn.Module, shape: tuple[int, ...], message: str) -> None:
    inputs = torch.randn(shape)
    with pytest.raises((RuntimeError, ValueError), match=message):
        network(inputs)
    with use_kernels(network), pytest.raises((RuntimeError, ValueError), match=message):
        network(inputs)


def test_batch_norm_of_one_value_per_channel_and_several_examples_equals_torch() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2))
    reference, inputs = copy.deepcopy(network), torch.randn(3, 1, 3, 3, 3)
    with use_kernels(network) as blocks:
        torch.testing.assert_close(network(inputs), reference(inputs), atol=1e-5, rtol=1e-5)
        assert blocks[0].is_sparse


@pytest.mark.parametrize("first_mode", [True, False])
def test_mode_of_the_normalisation_counts_not_that_of_the_convolution(first_mode: bool) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(1, 3, 3), nn.BatchNorm3d(3), nn.ReLU())
    reference, inputs = copy.deepcopy(network), torch.randn(2, 1, 6, 6, 6)
    with use_kernels(network) as blocks:
        for mode in (first_mode, not first_mode, first_mode):
            network[1].train(mode)
            reference[1].train(mode)
            torch.testing.assert_close(network(inputs), reference(inputs), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(network[1].running_mean, reference[1].running_mean)
            torch.testing.assert_close(network[1].running_var, reference[1].running_var)
            assert blocks[0].is_sparse


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1)])
def test_infinite_values_are_activated_as_by_torch(activation: nn.Module) -> None:
    network = nn.Sequential(nn.Conv3d(1, 1, 1, bias=False), activation)
    nn.init.ones_(next(network.parameters()))
    infinity, nan = float("inf"), float("nan")
    inputs = torch.tensor([-infinity, infinity, nan, -1.0, -3.3e38, 2.0]).view(1, 1, 1, 1, 6)
    with use_kernels(network), torch.no_grad():
        output = network(inputs)
    torch.testing.assert_close(output, activation(inputs), equal_nan=True)


def test_kernels_record_nothing_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[bool] = []
    convolve = block_module.convolve

    def convolve_and_note(*args: Any, record: bool) -> Any:
        recorded.append(record)
        return convolve(*args, record=record)

    monkeypatch.setattr(block_module, "convolve", convolve_and_note)
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.InstanceNorm3d(2), nn.MaxPool3d(2))
    with use_kernels(network):
        for mode in (True, False):
            with torch.set_grad_enabled(mode):
                network(torch.randn(1, 1, 6, 6, 6))
        network.requires_grad_(requires_grad=False)
        network(torch.randn(1, 1, 6, 6, 6))
    assert recorded == [True, False, False]


def test_weights_of_another_type_are_left_to_torch() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 3)).double()
    with use_kernels(network) as blocks, torch.no_grad():
        with pytest.raises(RuntimeError):
            network(torch.randn(1, 1, 6, 6, 6))
        network(torch.randn(1, 1, 6, 6, 6).double())
        assert not blocks[0].is_sparse


def test_decision_is_made_once_for_inputs_of_a_size() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU())
    works: list[Work] = []

    def decide(work: Work) -> bool:
        works.append(work)
        return False

    block = Block(find_chains(network)[0], torch.ones(2, 1, 3, 3, 3) > 0, decide)
    for _ in range(3):
        for samples in (1, 2):
            block(torch.randn(samples, 1, 6, 6, 6))
    with torch.no_grad():
        block(torch.randn(1, 1, 6, 6, 6))
    assert [(work.samples, work.is_training) for work in works] == [(1, True), (2, True), (1, False)]


def test_inputs_of_ever_new_sizes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "_DECISIONS", 6)
    network = nn.Sequential(nn.Conv3d(1, 2, (1, 3, 3)), nn.ReLU())
    reference = copy.deepcopy(network)
    with use_kernels(network) as blocks:
        for size in range(5, 20):
            inputs = torch.randn(1, 1, 1, size, 5)
            torch.testing.assert_close(network(inputs), reference(inputs), atol=1e-5, rtol=1e-5)
            assert len(blocks[0]._geometries) <= 6
            assert len(blocks[0]._plans) <= 4


class DoublingConv3d(nn.Conv3d):
    """A convolution with a forward pass of its own."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * 2


def test_layer_with_a_forward_pass_of_its_own_stays_dense() -> None:
    layer = nn.Conv3d(1, 2, 3)
    layer.forward = lambda inputs: 2 * inputs  # type: ignore[method-assign]
    assert find_chains(nn.Sequential(DoublingConv3d(1, 2, 3), layer)) == []


class DeepSupervision(nn.Module):
    """Reads a feature map twice in training, and once in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Conv3d(2, 1, 3)
        self.auxiliary = nn.Conv3d(2, 1, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = self.first(inputs)
        output: torch.Tensor = self.last(self.relu(features))
        return output + self.auxiliary(features) if self.training else output


@pytest.mark.parametrize("is_training", [True, False])
def test_layers_are_joined_only_if_they_are_neighbours_in_both_modes(is_training: bool) -> None:
    network = DeepSupervision().train(is_training)
    chains = {chain.name: chain.followers for chain in find_chains(network)}
    assert chains == {"first": [], "last": [], "auxiliary": []}
    assert all(module.training == is_training for module in network.modules())
    inputs = torch.randn(2, 1, 7, 7, 7)
    for mode in (True, False):
        expected = network.train(mode)(inputs)
        with use_kernels(network.train(is_training)):
            torch.testing.assert_close(network.train(mode)(inputs), expected, atol=1e-5, rtol=1e-5)


class StochasticDepth(nn.Sequential):
    """Leaves out its activation at random."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self[0](inputs)
        return self[1](features) if torch.rand(()) < 0.5 else features


def test_layers_of_a_network_that_draws_random_numbers_are_not_joined() -> None:
    network, state = StochasticDepth(nn.Conv3d(1, 2, 3), nn.ReLU()), torch.get_rng_state()
    assert [chain.followers for chain in find_chains(network)] == [[]]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("part", [0, 1])
def test_layers_with_hooks_are_not_joined(part: int) -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.InstanceNorm3d(2), nn.ReLU())
    seen: list[torch.Tensor] = []
    network[part].register_forward_hook(lambda module, inputs, output: seen.append(output))
    network(inputs := torch.randn(1, 1, 6, 6, 6))
    with use_kernels(network):
        network(inputs)
    torch.testing.assert_close(seen[1], seen[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "change", [lambda y: y.transpose_(2, 3), lambda y: setattr(y, "data", y.data * 2), lambda y: y.mul_(2)]
)
@torch.no_grad()
def test_a_feature_map_that_is_changed_before_the_next_layer_is_read_as_it_is(change: Any) -> None:
    first, last = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 1, 3, padding=1)
    network = nn.ModuleList([first, last])

    def compute(inputs: torch.Tensor) -> torch.Tensor:
        features = first(inputs)
        change(features)
        output: torch.Tensor = last(features)
        return output

    inputs = torch.randn(2, 1, 6, 6, 6)
    expected = compute(inputs)
    with use_kernels(network):
        for _ in range(2):
            torch.testing.assert_close(compute(inputs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spike", [1e3, 1e5])
@torch.no_grad()
def test_an_outlier_in_the_first_voxel_costs_no_digits(spike: float) -> None:
    network = nn.Sequential(nn.Conv3d(1, 1, 1, bias=False), nn.InstanceNorm3d(1))
    network[0].weight.fill_(1.0)
    inputs = torch.randn(1, 1, 40, 40, 40, generator=torch.Generator().manual_seed(0))
    inputs[0, 0, 0, 0, 0] += spike
    expected = copy.deepcopy(network).double()(inputs.double()).flatten()[1:]
    with use_kernels(network):
        error = (network(inputs).flatten()[1:].double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_second_derivatives_are_refused() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU())
    inputs = torch.randn(1, 1, 5, 5, 5, requires_grad=True)
    with use_kernels(network), pytest.raises(ConfigError, match=r"second derivative.*training\.compute to dense"):
        torch.autograd.grad(network(inputs).sum(), inputs, create_graph=True)
