"""Layouts: the exchanged tensors of a network and its frozen base model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import Layout, get_frozen_tensors, match_state_dict


def net(scale: float = 1.0) -> nn.Sequential:
    """A frozen body with running statistics under a trainable head."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
    body.requires_grad_(requires_grad=False)
    with torch.no_grad():
        body[0].weight.mul_(scale)
    return nn.Sequential(body, head)


def test_network_without_frozen_parameters_has_no_base_model() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    assert get_frozen_tensors(module) == {}
    assert Layout.from_module(module) == Layout(Layout.from_module(module).tensors)
    assert len(Layout.from_module(module).tensors) == 6


def test_layout_excludes_frozen_tensors_and_their_statistics() -> None:
    names = [spec.name for spec in Layout.from_module(net()).tensors]
    assert names == ["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias", "1.0.running_mean", "1.0.running_var"]
    assert {"0.0.weight", "0.1.running_mean", "0.1.running_var"} <= get_frozen_tensors(net()).keys()


def test_names_of_a_state_dict_are_matched_with_the_tensors_that_they_stand_for() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.empty, self.none = nn.Buffer(torch.zeros(0)), nn.Buffer(torch.zeros(0))
            self.b.weight = self.a.weight

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
            tensors = super().state_dict(*args, **kwargs)
            return {**tensors, "new": tensors["a.weight"], "turned": tensors["a.weight"].T, "copy": torch.zeros(2, 2)}

    matches = match_state_dict(Tied())
    assert {name: own for name, own in matches.items() if name != own} == {"b.weight": "a.weight", "new": "a.weight"}
    assert matches.keys() == {"a.weight", "b.weight", "empty", "none", "new"}


def test_layouts_over_different_base_models_differ() -> None:
    ours, same, other = (Layout.from_module(net(scale)) for scale in (1.0, 1.0, 1.0000001))
    assert ours.fingerprint == same.fingerprint != other.fingerprint
    assert ours.tensors == other.tensors
    shifted = net()
    shifted[0][1].running_mean[0] += 1  # statistics are part of the base model
    assert Layout.from_module(shifted).fingerprint != ours.fingerprint


def test_frozen_base_model_may_be_of_any_type_which_its_digest_names() -> None:
    digests = {}
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        module = net()
        module[0].to(torch.bfloat16).to(kind)
        layout = Layout.from_module(module)
        assert layout.tensors == Layout.from_module(net()).tensors
        digests[kind] = layout.base_model_digest
    assert len(set(digests.values())) == 3
    with torch.no_grad():
        module[0][0].weight[0, 0] += 1
    assert Layout.from_module(module).base_model_digest not in digests.values()


def test_parameter_that_trains_is_float32() -> None:
    module = net()
    module[1].bfloat16()
    with pytest.raises(ConfigError, match=r"parameter '1\.0\.weight' is torch\.bfloat16; expected torch\.float32"):
        Layout.from_module(module)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            nn.Sequential(nn.LazyLinear(4)),
            "layer '0' is LazyLinear, whose weights have no shape",
        ),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d()), "layer '1' is LazyBatchNorm1d"),
        (nn.Sequential(nn.LazyConv3d(4, 3)), "layer '0' is LazyConv3d"),
    ],
)
def test_layers_without_weights_are_refused_in_words(network: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout.from_module(network)


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrised_layers_have_the_tensors_of_their_state(wrap: Any) -> None:
    network = nn.Sequential(wrap(nn.Linear(3, 2)))
    layout = Layout.from_module(network)
    assert {spec.name for spec in layout.tensors} == set(network.state_dict())
