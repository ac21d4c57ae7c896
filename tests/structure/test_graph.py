"""Channel graphs of networks, and what they have no word for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flare_sparse.models import build
from flare_sparse.params import Layout, TensorSpec
from flare_sparse.structure import Untraceable, build_channel_graph, find_removable_layers
from flare_sparse.structure.nodes import Pad, Sum


class Forward(nn.Module):
    """Some layers and a forward pass given as a function."""

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


def test_a_layout_keeps_the_skeleton_of_its_network_and_no_numbers() -> None:
    network = build("mlp", features=5)
    layout = Layout.from_module(network)
    assert layout.skeleton is not None
    assert {p.device.type for p in layout.skeleton.parameters()} == {"meta"}
    assert layout == Layout(layout.tensors)
    assert hash(layout) == hash(Layout(layout.tensors))
    assert Layout.from_module(layout.skeleton) == layout


@pytest.mark.parametrize(("name", "layers", "sums"), [("resnet32", 32, 15), ("resnet110", 110, 54)])
def test_residual_networks_are_graphs_of_sums(name: str, layers: int, sums: int) -> None:
    found = graph(build(name))
    assert len(found.layers) == layers
    assert sum(isinstance(value, Sum) for value in found.values) == sums
    assert sum(isinstance(value, Pad) and value.before == 0 for value in found.values) == sums


@pytest.mark.parametrize(
    "flatten",
    [
        lambda self, x: self.head(self.conv(x).flatten(1)),
        lambda self, x: self.head(torch.flatten(self.conv(x), 1)),
        lambda self, x: self.head(self.conv(x).view(x.size(0), -1)),
        lambda self, x: self.head(self.conv(x).reshape(x.shape[0], -1)),
    ],
)
def test_ways_to_flatten(flatten: object) -> None:
    assert len(graph(Forward(flatten, conv=conv(), head=nn.Linear(64, 2))).layers) == 2


def test_ways_to_pool_and_scale() -> None:
    def run(self, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # noqa: ANN001
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2) * 0.5 + 1.0
        return self.head(nn.functional.dropout(x.mean((2, 3)), 0.1, self.training))

    found = find_removable_layers(graph(Forward(run, conv=conv(), head=nn.Linear(4, 2))))
    assert [(layer.module, layer.units, layer.readers) for layer in found] == [("conv", 4, ("head",))]


@pytest.mark.parametrize(
    ("why", "network"),
    [
        ("used twice", Forward(lambda s, x: s.back(s.back(s.conv(x))), conv=conv(), back=nn.Conv2d(4, 4, 1))),
        ("'matmul'", Forward(lambda s, x: torch.matmul(s.conv(x), x), conv=conv())),
        ("flattened channels", Forward(lambda s, x: s.head(s.conv(x)), conv=conv(), head=nn.Linear(8, 2))),
        ("ConvTranspose2d", Forward(lambda s, x: s.up(s.conv(x)), conv=conv(), up=nn.ConvTranspose2d(4, 2, 2))),
        ("added to itself", Forward(twice, conv=conv())),
        ("different channels", Forward(lambda s, x: s.conv(x) + s.a(x), conv=conv(), a=nn.Conv2d(1, 1, 1))),
        ("cannot be traced", Forward(lambda s, x: s.conv(x) if x.sum() > 0 else x, conv=conv())),
        ("not a feature map", Forward(lambda s, x: (s.conv(x), x), conv=conv())),
        ("not plain zeros", Forward(lambda s, x: nn.functional.pad(s.conv(x), (1, 1), value=2.0), conv=conv())),
        ("the input beside", Forward(lambda s, x: torch.cat([s.conv(x), x], 1), conv=conv())),
        ("grouped convolution of the input", nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_place(why: str, network: nn.Module) -> None:
    with pytest.raises(Untraceable, match=why):
        graph(network)


def test_a_layout_without_a_network_has_no_graph() -> None:
    with pytest.raises(Untraceable, match="was not made of a network"):
        build_channel_graph(Layout((TensorSpec("w", (3,), "weight"),)))
