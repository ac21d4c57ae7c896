"""Channel graphs of networks, and operations that they do not support."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flare_sparse.compute.structure.graph import Untraceable, build_channel_graph
from flare_sparse.compute.structure.nodes import Pad, Sum
from flare_sparse.compute.structure.removal import find_removable_layers
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.tasks.models import build_model


class Forward(nn.Module):
    """A network of some layers whose forward pass is a function."""

    def __init__(self, run: object, **layers: nn.Module):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)  # type: ignore[operator,no-any-return]


def twice(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
    y = self.conv(x)
    return y + y


def conv() -> nn.Module:
    return nn.Conv2d(1, 4, 3, padding=1)


def graph(network: nn.Module):  # type: ignore[no-untyped-def]  # noqa: ANN201
    return build_channel_graph(Layout.from_module(network))


def test_layout_keeps_the_network_on_the_meta_device() -> None:
    network = build_model("mlp", features=5)
    layout = Layout.from_module(network)
    assert layout.skeleton is not None
    assert {p.device.type for p in layout.skeleton.parameters()} == {"meta"}
    assert layout == Layout(layout.tensors)
    assert hash(layout) == hash(Layout(layout.tensors))
    assert Layout.from_module(layout.skeleton) == layout


@pytest.mark.parametrize(("name", "layers", "sums"), [("resnet32", 32, 15), ("resnet110", 110, 54)])
def test_residual_networks_have_sums_and_pads(name: str, layers: int, sums: int) -> None:
    result = graph(build_model(name))
    assert len(result.layers) == layers
    assert sum(isinstance(value, Sum) for value in result.values) == sums
    assert sum(isinstance(value, Pad) and value.before == 0 for value in result.values) == sums


@pytest.mark.parametrize(
    "flatten",
    [
        lambda self, x: self.head(self.conv(x).flatten(1)),
        lambda self, x: self.head(torch.flatten(self.conv(x), 1)),
        lambda self, x: self.head(self.conv(x).view(x.size(0), -1)),
        lambda self, x: self.head(self.conv(x).reshape(x.shape[0], -1)),
    ],
)
def test_every_way_to_flatten_is_traced(flatten: object) -> None:
    assert len(graph(Forward(flatten, conv=conv(), head=nn.Linear(64, 2))).layers) == 2


def test_pooling_and_scaling_are_traced() -> None:
    def run(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2) * 0.5 + 1.0
        return self.head(nn.functional.dropout(x.mean((2, 3)), 0.1, self.training))

    result = find_removable_layers(graph(Forward(run, conv=conv(), head=nn.Linear(4, 2))))
    assert [(layer.module, layer.units, layer.readers) for layer in result] == [("conv", 4, ("head",))]


@pytest.mark.parametrize(
    ("reason", "network"),
    [
        ("used twice", Forward(lambda s, x: s.back(s.back(s.conv(x))), conv=conv(), back=nn.Conv2d(4, 4, 1))),
        ("'matmul'", Forward(lambda s, x: torch.matmul(s.conv(x), x), conv=conv())),
        ("flattened channels", Forward(lambda s, x: s.head(s.conv(x)), conv=conv(), head=nn.Linear(8, 2))),
        ("ConvTranspose2d", Forward(lambda s, x: s.up(s.conv(x)), conv=conv(), up=nn.ConvTranspose2d(4, 2, 2))),
        ("added to itself", Forward(twice, conv=conv())),
        ("different channels", Forward(lambda s, x: s.conv(x) + s.a(x), conv=conv(), a=nn.Conv2d(1, 1, 1))),
        ("cannot be traced", Forward(lambda s, x: s.conv(x) if x.sum() > 0 else x, conv=conv())),
        ("not a feature map", Forward(lambda s, x: (s.conv(x), x), conv=conv())),
        (
            "other than constant zeros",
            Forward(lambda s, x: nn.functional.pad(s.conv(x), (1, 1), value=2.0), conv=conv()),
        ),
        ("the input concatenated", Forward(lambda s, x: torch.cat([s.conv(x), x], 1), conv=conv())),
        ("grouped convolution of the input", nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))),
    ],
)
def test_unsupported_operations_raise_and_are_named(reason: str, network: nn.Module) -> None:
    with pytest.raises(Untraceable, match=reason):
        graph(network)


def test_layout_without_a_network_has_no_graph() -> None:
    with pytest.raises(Untraceable, match="was not built from a network"):
        build_channel_graph(Layout((TensorSpec("w", (3,), "weight"),)))
