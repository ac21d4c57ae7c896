"""``model: {norm: group}``: group normalisation in place of batch normalisation, in any ready-made network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flare_sparse.compute.structure.nodes import choose_groups, mixes_examples, replace_batch_norms
from flare_sparse.core.errors import ConfigError
from flare_sparse.tasks.models import MODELS, ModelConfig
from flare_sparse.training.private import check_private_network


@pytest.mark.parametrize("channels", range(1, 130))
def test_groups_divide_the_channels_and_have_two_or_more(channels: int) -> None:
    groups = choose_groups(channels)
    assert 1 <= groups <= 32
    assert channels % groups == 0
    assert channels // groups >= 2 or channels == 1


@pytest.mark.parametrize("name", ["resnet32", "alexnet3d"])
def test_network_has_group_normalisation_under_the_same_names_and_can_be_private(name: str) -> None:
    shape = {"image": (3, 16, 16)} if name == "resnet32" else {"volume": (96, 96, 96)}
    with torch.device("meta"):
        plain = ModelConfig.model_validate({"name": name}).build(**shape, outputs=2)
        network = ModelConfig.model_validate({"name": name, "norm": "group"}).build(**shape, outputs=2)
    assert any(mixes_examples(part) for part in plain.modules())
    assert not any(mixes_examples(part) for part in network.modules())
    shapes = {key: value.shape for key, value in plain.named_parameters()}
    assert {key: value.shape for key, value in network.named_parameters()} == shapes
    assert not list(network.named_buffers())
    check_private_network(network)
    with pytest.raises(ConfigError, match=r"set task\.model\.norm: group"):
        check_private_network(plain)


def test_gradient_of_an_example_does_not_depend_on_the_others() -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, eps=1e-3), nn.ReLU(), nn.Conv2d(8, 1, 3))
    assert replace_batch_norms(network) == 1
    assert isinstance(network[1], nn.GroupNorm)
    assert (network[1].num_groups, network[1].eps, network[1].affine) == (4, 1e-3, True)
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(network(images)[:1], network(images[:1]))


def test_network_without_batch_normalisation_has_nothing_to_replace() -> None:
    assert "mlp" in MODELS
    with pytest.raises(ConfigError, match=r"model\.norm: mlp has no batch normalisation; leave norm out"):
        ModelConfig.model_validate({"name": "mlp", "norm": "group"}).build(features=3, outputs=1)
