"""A gated network made physically smaller, for a site that never opens some channels: no gate is asked about them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..mask import Mask
from ..params import Layout
from .channels import CHANNELWISE, CONVOLUTIONS, cut_channels, keep, leaves


def compact_network(network: nn.Sequential, seen: Mapping[str, Tensor]) -> nn.Sequential:
    """A copy without the channels that were closed throughout.

    The result is the network's function, up to rounding, on inputs that open none of the removed channels and close
    none of a layer whose gate goes. A channel whose gate group is zero is closed for every input; one that was closed
    on the examples seen may open on others.

    Args:
        network: sequential, with gated layers, modules of a ``body`` and a ``gate``.
        seen: gates ``(n, channels)`` in {0, 1} by name of the gated layer, such as from ``observe_gates``.

    Raises:
        ConfigError: what reads a gated layer's channels cannot be found.
    """
    small = copy.deepcopy(network)
    for name, q in seen.items():
        _cut(small, name, (q != 0).any(0))
        if bool(((q != 0).any(0) == (q != 0).all(0)).all()):
            _open(small, name)
    return small


def remove_channels(network: nn.Sequential, closed: Mapping[str, Tensor]) -> tuple[nn.Sequential, Mask]:
    """A copy without channels that are closed for every input, and which entries of the network's vector it has.

    All gates stay and decide about the channels that are left. A vector of the smaller network is ``mask.take(vector)``
    of the whole one's.

    Args:
        network: sequential, with gated layers, modules of a ``body`` and a ``gate``.
        closed: bool ``(channels,)`` by name of the gated layer.

    Raises:
        ConfigError: no channel is left of a layer, or what reads its channels cannot be found.
    """
    layout, numbered = Layout.from_module(network), copy.deepcopy(network).double()
    positions = layout.unflatten(torch.arange(layout.size, dtype=torch.float64))  # exact, unlike float32
    numbered.load_state_dict({**numbered.state_dict(), **positions})
    small = copy.deepcopy(network)
    for name, channels in closed.items():
        if bool(channels.any()):
            _cut(numbered, name, ~channels)
            _cut(small, name, ~channels)
    left = Layout.from_module(small).flatten({**dict(numbered.named_parameters()), **dict(numbered.named_buffers())})
    on = torch.zeros(layout.size, dtype=torch.bool)
    on[left.long()] = True
    return small, Mask(on)


def is_gated(part: Any) -> bool:
    """Whether this is a block whose output channels a gate opens and closes, as ``models/gates.py`` makes them."""
    return isinstance(part, nn.Module) and {"body", "gate"} <= {name for name, _ in part.named_children()}


def _cut(network: nn.Sequential, name: str, channels: Tensor) -> None:
    """Leave only these ``channels`` (bool) of a gated layer, in place."""
    layer: Any = dict(network.named_modules()).get(name)
    if not is_gated(layer):
        raise ConfigError(f"{name!r} is not a gated layer; gated are: {_gated(network)}")
    live = channels.nonzero().squeeze(1)
    if not len(live):
        raise ConfigError(f"{name!r}: every channel is closed, nothing would be left of the layer")
    layer.body = cut_channels(layer.body, live)
    _cut_reader(network, layer, live, len(channels))
    layer.gate.open = _rows(layer.gate.open, live)


def _open(network: nn.Sequential, name: str) -> None:
    """Take the gate away from a layer."""
    parts = dict(network.named_modules())
    prefix, _, last = name.rpartition(".")
    layer = parts[name]
    assert is_gated(layer)
    setattr(parts[prefix], last, layer.body)


def _gated(network: nn.Module) -> str:
    return ", ".join(name for name, part in network.named_modules() if is_gated(part)) or "none"


def _cut_reader(network: nn.Sequential, layer: nn.Module, live: Tensor, channels: int) -> None:
    """The next convolution or linear layer, and the gate beside it, lose the inputs that are never there."""
    order: list[Any] = _flat(network)
    for part in order[order.index(layer) + 1 :]:
        inner = next(leaves(part.body)) if is_gated(part) else part
        if isinstance(inner, CONVOLUTIONS) and inner.in_channels == channels and inner.groups == 1:
            inner.weight = nn.Parameter(inner.weight.detach()[:, live])
            inner.in_channels = len(live)
            if is_gated(part):
                part.gate.hidden = _columns(part.gate.hidden, live, channels)
            return
        if isinstance(inner, nn.Linear) and inner.in_features % channels == 0:
            _keep_columns(inner, live, channels)
            return
        if not isinstance(inner, (*CHANNELWISE, nn.Flatten)):
            break
    raise ConfigError("what reads the channels of a gated layer must be the next convolution or linear layer")


def _flat(network: nn.Module) -> list[nn.Module]:
    return [leaf for part in network.children() for leaf in leaves(part)]


def _keep_columns(linear: nn.Linear, live: Tensor, channels: int) -> None:
    """A flattened feature map: each channel is a run of ``in_features / channels`` columns."""
    weight = linear.weight.detach().unflatten(1, (channels, -1))[:, live].flatten(1)
    linear.weight, linear.in_features = nn.Parameter(weight.contiguous()), weight.shape[1]


def _columns(linear: nn.Linear, live: Tensor, channels: int) -> nn.Linear:
    cut = copy.deepcopy(linear)
    _keep_columns(cut, live, channels)
    return cut


def _rows(linear: nn.Linear, live: Tensor) -> nn.Linear:
    cut = copy.deepcopy(linear)
    keep(cut, live, "weight", "bias")
    cut.out_features = len(live)
    return cut
