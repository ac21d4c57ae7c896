"""A network compiled for inference: outputs that are saved, and weights that change afterwards."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flare_sparse.compute.kernels.network import Block, compile_network, use_sparse_kernels


def build_network(seed: int = 0, density: float = 0.2) -> nn.Sequential:
    """Return a network of sparse convolutions, with another mask for each seed."""
    generator = torch.Generator().manual_seed(seed)
    network = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ReLU(), nn.Conv3d(4, 3, 3, padding=1)
    ).eval()
    for parameter in network.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        is_live = torch.rand(parameter.shape, generator=generator) < density
        parameter.data.copy_(values * is_live if parameter.dim() > 1 else values)
    return network


def decide_for_kernels(_: object) -> bool:
    return True


def get_blocks(network: nn.Module) -> list[Block]:
    return [vars(part)["forward"] for part in network.modules() if isinstance(vars(part).get("forward"), Block)]


def save_and_load(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    # The values alone: the storage and a few hundred bytes for each of its descriptions.
    assert file.tell() < tensor.numel() * tensor.element_size() + 3000
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


@torch.no_grad()
def test_output_of_a_compiled_network_is_saved_and_loaded() -> None:
    compiled = compile_network(build_network(), decide_for_kernels)
    inputs = torch.randn(2, 2, 5, 6, 7)
    for _ in range(2):
        output = compiled(inputs)
        assert torch.equal(save_and_load(output), output)
        assert not vars(output)
        assert torch.equal(copy.deepcopy(output), output)


def test_output_of_training_is_saved_and_loaded() -> None:
    network = build_network()
    live = {name: parameter != 0 for name, parameter in network.named_parameters() if parameter.dim() > 1}
    with use_sparse_kernels(network, live, decide_for_kernels):
        output = network(torch.randn(2, 2, 5, 6, 7))
        output.sum().backward()
    assert torch.equal(save_and_load(output), output)


@pytest.mark.slow
@torch.no_grad()
def test_output_does_not_keep_the_network() -> None:
    compiled = compile_network(build_network(), decide_for_kernels)
    output = compiled(torch.randn(1, 2, 5, 6, 7))
    reference = weakref.ref(get_blocks(compiled)[-1])
    del compiled
    gc.collect()
    assert reference() is None
    assert output.isfinite().all()


def load_other_mask(network: nn.Module) -> None:
    network.load_state_dict(build_network(seed=1).state_dict())


def load_larger_mask(network: nn.Module) -> None:
    network.load_state_dict(build_network(seed=1, density=0.8).state_dict())


def fill_in_place(network: nn.Module) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.5)


def move_one_weight_by_data(network: nn.Module) -> None:
    """The number of weights that are not 0 stays the same, and so does the version of the tensor."""
    weight = next(network.parameters()).data.view(-1)
    is_live = weight != 0
    source, target = int(is_live.nonzero()[0]), int((~is_live).nonzero()[0])
    weight[target] = weight[source]
    weight[source] = 0


def replace_parameter(network: nn.Module) -> None:
    weight: Any = build_network(seed=2)[3].weight
    network.get_submodule("3").weight = nn.Parameter(weight.detach())


@pytest.mark.parametrize(
    "change", [load_other_mask, load_larger_mask, fill_in_place, move_one_weight_by_data, replace_parameter]
)
@pytest.mark.parametrize("duplicate", [None, copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
@torch.no_grad()
def test_compiled_network_follows_changes_of_its_weights(
    change: Callable[[nn.Module], None], duplicate: Callable[[nn.Module], nn.Module] | None
) -> None:
    network = build_network()
    compiled = compile_network(network, decide_for_kernels)
    inputs = torch.randn(2, 2, 5, 6, 7)
    torch.testing.assert_close(compiled(inputs), network(inputs), atol=1e-5, rtol=1e-5)
    if duplicate is not None:
        compiled = duplicate(compiled)
    change(network)
    change(compiled)
    for _ in range(2):
        torch.testing.assert_close(compiled(inputs), network(inputs), atol=1e-4, rtol=1e-5)
    assert all(block.is_sparse for block in get_blocks(compiled))


@torch.no_grad()
def test_decision_follows_the_number_of_live_weights() -> None:
    network = build_network()
    compiled = compile_network(network, lambda work: work.live < 100)
    inputs = torch.randn(2, 2, 5, 6, 7)
    compiled(inputs)
    assert [block.is_sparse for block in get_blocks(compiled)] == [True, True]
    fill_in_place(network)
    fill_in_place(compiled)
    for block in get_blocks(compiled):
        block.is_sparse = False
    assert torch.equal(compiled(inputs), network(inputs))
    assert [block.is_sparse for block in get_blocks(compiled)] == [False, False]
    sparse = build_network()
    compiled.load_state_dict(sparse.state_dict())
    torch.testing.assert_close(compiled(inputs), sparse(inputs), atol=1e-5, rtol=1e-5)
    assert [block.is_sparse for block in get_blocks(compiled)] == [True, True]


@torch.no_grad()
def test_live_weights_of_an_unchanged_network_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_network(build_network(), decide_for_kernels)
    updates: list[int] = []
    monkeypatch.setattr(Block, "_set_live", lambda block, live: updates.append(1))
    for _ in range(3):
        compiled(torch.randn(2, 2, 5, 6, 7))
    assert updates == []
