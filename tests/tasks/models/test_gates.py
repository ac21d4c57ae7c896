"""Channel gates: docs/algorithms.md, section 6.8, invariants 8 and 9; errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import Layout
from flare_sparse.tasks.models import ModelConfig, build_model
from flare_sparse.tasks.models.gates import ChannelGate, GateConfig, add_gates, binarize_straight_through

NETWORKS = {
    "image_cnn": ({"image": (3, 16, 16), "channels": (4, 8, 8)}, ("1", "2"), (3, 16, 16)),
    "image_cnn6": ({"image": (3, 16, 16), "channels": (4, 6, 8)}, ("4", "5"), (3, 16, 16)),
    "brain_age_cnn_3mm": (
        {"volume": (8, 8, 8), "channels": (4, 6, 8), "reduced": 4, "pooled": 2},
        ("1", "2"),
        (1, 8, 8, 8),
    ),
    "brain_age_cnn": ({"volume": (34, 34, 64)}, ("4",), (1, 34, 34, 64)),
}


def network(name: str, **settings: object) -> tuple[nn.Sequential, nn.Sequential, torch.Tensor]:
    """Return the same network without and with gates, and a batch."""
    own, layers, shape = NETWORKS[name]
    torch.manual_seed(1)
    plain = build_model(name, **own)
    torch.manual_seed(1)
    wrapped = add_gates(build_model(name, **own), GateConfig(layers=layers, **settings))
    return plain.eval(), wrapped.eval(), torch.randn(3, *shape)  # type: ignore[return-value]


def gates(model: nn.Module) -> list[ChannelGate]:
    return [part for part in model.modules() if isinstance(part, ChannelGate)]


@torch.no_grad()
def disagree(model: nn.Module, closed: int) -> None:
    """Make gates differ between examples; the gate group of channel ``closed`` is zero."""
    for gate in gates(model):
        gate.hidden.weight.normal_(0, 30)
        gate.open.weight.normal_()
        gate.open.bias.zero_()
        gate.open.weight[closed] = 0


@torch.no_grad()
def close(model: nn.Module, closed: list[int]) -> None:
    """Set the gate groups of these channels to zero; all others are open for every input."""
    for gate in gates(model):
        gate.open.weight.zero_()
        gate.open.bias.fill_(1)
        gate.open.bias[closed] = 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("training", [False, True])
def test_network_with_all_gates_open_equals_the_backbone_bit_for_bit(name: str, training: bool) -> None:
    plain, wrapped, x = network(name)
    close(wrapped, [])
    assert torch.equal(plain.train(training)(x), wrapped.train(training)(x))
    with torch.no_grad():
        assert torch.equal(plain(x), wrapped(x))


@pytest.mark.parametrize("grad", [False, True])
def test_layer_with_all_gates_closed_is_zero(grad: bool) -> None:
    _, wrapped, x = network("image_cnn")
    close(wrapped, list(range(8)))
    out: list[torch.Tensor] = []
    layer = wrapped[2]
    layer.register_forward_hook(lambda _, __, y: out.append(y))
    with torch.set_grad_enabled(grad):
        wrapped(x)
    assert not out[0].any()


@settings(deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=20), st.floats(0.2, 5))
def test_gates_are_binary_and_their_gradient_is_that_of_the_sigmoid(values: list[float], tau: float) -> None:
    z = torch.tensor(values, requires_grad=True)
    upstream = torch.linspace(-1, 2, len(values))
    q = binarize_straight_through(z, tau)
    q.backward(upstream)
    assert q.tolist() == [float(value > 0) for value in values]
    soft = torch.sigmoid(z.detach() / tau)
    assert torch.allclose(z.grad, upstream * soft * (1 - soft) / tau, atol=1e-6)  # type: ignore[arg-type]


def test_zero_gate_group_closes_its_channel_for_every_input() -> None:
    _, wrapped, x = network("image_cnn")
    gate = gates(wrapped)[0]
    with torch.no_grad():
        gate.open.weight[2], gate.open.bias[2] = 0, 0
        for scale in (0.0, 1.0, -50.0, 1e4):
            assert not gate(x[:, :1].repeat(1, gate.hidden.in_features, 1, 1) * scale)[:, 2].any()


def test_running_statistics_include_closed_channels() -> None:
    block = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    wrapped = add_gates(nn.Sequential(block), GateConfig(layers=("0",))).train()
    close(wrapped, [1])
    with torch.no_grad():
        wrapped(torch.randn(3, 2, 6, 6) + 2)
    assert block[1].running_mean.count_nonzero() == 4


def test_gate_noise_is_added_in_training_only() -> None:
    gate = ChannelGate(3, 4, GateConfig(layers=("0",), noise=True))
    with torch.no_grad():
        gate.open.weight.zero_()
        gate.open.bias.fill_(0.5)
    x = torch.randn(200, 3, 2, 2)
    assert gate.train()(x).mean().item() == pytest.approx(torch.sigmoid(torch.tensor(0.5)).item(), abs=0.06)
    assert gate.eval()(x).all()


def test_detach_input_stops_the_gradient_into_earlier_layers() -> None:
    for detach in (False, True):
        x = torch.randn(2, 3, 4, 4, requires_grad=True)
        q = ChannelGate(3, 4, GateConfig(layers=("0",), detach_input=detach))(x)
        assert q.requires_grad
        assert (torch.autograd.grad(q.sum(), x, allow_unused=True)[0] is None) is detach


def test_gated_network_has_the_backbone_weights_of_the_plain_one() -> None:
    plain, wrapped, _ = network("image_cnn")
    shared = {name: p for name, p in wrapped.named_parameters() if ".gate." not in name}
    assert [p.sum().item() for p in plain.parameters()] == [p.sum().item() for p in shared.values()]
    sizes = [e.size for e in Layout.from_module(wrapped).tensors if ".gate." in e.name]
    assert sum(sizes) == (4 * 16 + 16 + 16 * 8 + 8) + (8 * 16 + 16 + 16 * 8 + 8)


def test_gate_from_64_to_128_channels_has_3216_scalars() -> None:
    section = {"name": "image_cnn", "channels": [32, 64, 128], "gates": {"layers": ["2"]}}
    layout = Layout.from_module(ModelConfig.model_validate(section).build(image=(3, 32, 32), outputs=10))
    assert sum(e.size for e in layout.tensors if ".gate." in e.name) == 3216


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (("7",), "no layer '7'"),
        (("2", "2"), "named twice"),
        (("3",), "holds 0 convolutions"),
        (("2.0.conv.weight",), "no layer"),
    ],
)
def test_layers_that_cannot_be_gated_raise(layers: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_gates(build_model("image_cnn", image=(1, 16, 16), channels=(4, 4, 4)), GateConfig(layers=layers))


@pytest.mark.parametrize(
    ("block", "layer", "message"),
    [
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), "0", "followed by BatchNorm2d"),
        (nn.Sequential(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4))), "0", "holds GroupNorm"),
        (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2)), "0", "grouped convolution"),
    ],
)
def test_gate_around_part_of_a_block_raises(block: nn.Module, layer: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_gates(block, GateConfig(layers=(layer,)))


def test_section_of_a_gated_network_round_trips() -> None:
    section = ModelConfig.model_validate({"name": "image_cnn", "gates": {"layers": ["1"]}})
    dumped = section.model_dump(mode="json")
    assert dumped["gates"]["layers"] == ["1"]
    assert ModelConfig.model_validate(dumped) == section
    with pytest.raises(ValidationError, match="hiden"):
        ModelConfig.model_validate({"name": "image_cnn", "gates": {"layers": ["1"], "hiden": 4}})


def test_small_open_bias_starts_with_some_channels_closed() -> None:
    shares = []
    for bias in (0.0, 0.1, 1.0):
        torch.manual_seed(0)
        gate = ChannelGate(8, 64, GateConfig(layers=("0",), open_bias=bias))
        shares.append(gate(torch.rand(4, 8, 3, 3)).mean().item())
    assert shares[0] < shares[1] < shares[2] == 1
