"""Smaller copies of gated networks: the same function and gradients without the closed channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flare_sparse.compute.structure.compact import compact_model
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import Layout
from flare_sparse.tasks.models import build_model
from flare_sparse.tasks.models.gates import ChannelGate, GateConfig, add_gates

NETWORKS = {
    "image_cnn": ({"image": (3, 16, 16), "channels": (4, 8, 8)}, ("1", "2"), (3, 16, 16)),
    "image_cnn6": ({"image": (3, 16, 16), "channels": (4, 6, 8)}, ("4", "5"), (3, 16, 16)),
    "brain_age_cnn_3mm": (
        {"volume": (8, 8, 8), "channels": (4, 6, 8), "reduced": 4, "pooled": 2},
        ("1", "2"),
        (1, 8, 8, 8),
    ),
}


def network(name: str) -> tuple[nn.Sequential, Tensor]:
    own, layers, shape = NETWORKS[name]
    torch.manual_seed(1)
    wrapped = add_gates(build_model(name, **own), GateConfig(layers=layers))  # type: ignore[arg-type]
    return wrapped.eval(), torch.randn(16, *shape)  # type: ignore[return-value]


def gates(model: nn.Module) -> list[ChannelGate]:
    return [part for part in model.modules() if isinstance(part, ChannelGate)]


@torch.no_grad()
def close(model: nn.Module, closed: list[int], weight: float = 0.0) -> None:
    """Set these channels' gate groups to zero; all others are open for every input, or for some with ``weight``."""
    for part in model.modules():
        if isinstance(part, ChannelGate):
            part.open.weight.normal_(0, weight) if weight else part.open.weight.zero_()
            part.open.bias.fill_(0 if weight else 1)
            part.hidden.weight.normal_(0, 30)  # gates that differ from example to example
            part.open.weight[closed] = 0
            part.open.bias[closed] = 0


@pytest.mark.parametrize("name", NETWORKS)
def test_compact_model_is_the_same_function_without_channels_that_no_input_opens(name: str) -> None:
    wrapped, x = network(name)
    close(wrapped, [1, 3], weight=3.0)
    small = compact_model(wrapped.eval())
    assert len(gates(small)) == len(gates(wrapped))
    assert Layout.from_module(small).size < Layout.from_module(wrapped).size
    assert torch.allclose(small(x), wrapped(x), atol=1e-5)


def test_compact_model_leaves_a_gated_layer_without_closed_channels_as_it_is() -> None:
    """Nothing reads the channels of the last layer, so none of them could be cut."""
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    wrapped = add_gates(nn.Sequential(*layers), GateConfig(layers=("0", "2"))).eval()
    close(wrapped, [])
    with torch.no_grad():
        gates(wrapped)[0].open.bias[1] = 0
    small, x = compact_model(wrapped), torch.randn(3, 1, 8, 8)
    assert [gate.open.out_features for gate in gates(small)] == [3, 4]
    assert torch.allclose(small(x), wrapped(x), atol=1e-5)


def test_a_layer_whose_channels_are_all_closed_keeps_one() -> None:
    wrapped, x = network("image_cnn")
    close(wrapped, list(range(8)))
    small = compact_model(wrapped)
    assert [gate.open.out_features for gate in gates(small)] == [1, 1]
    assert torch.allclose(small(x), wrapped(x), atol=1e-5)


def test_networks_that_cannot_be_made_smaller_raise() -> None:
    wrapped, _ = network("image_cnn")
    close(wrapped, [])
    with pytest.raises(ConfigError, match="no unit or channel of this network is off"):
        compact_model(wrapped)
    last = add_gates(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), GateConfig(layers=("0",)))
    close(last, [1])
    with pytest.raises(ConfigError, match=r"must be read by the next convolution \(groups=1\) or linear layer"):
        compact_model(last)
