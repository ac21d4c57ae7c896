"""A gated network made physically smaller, for a site that never opens some channels: no gate is asked about them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from ..errors import ConfigError
from .channels import CHANNELWISE, CONVOLUTIONS, cut_channels, keep, leaves
from .gates import Gated


def compact(network: nn.Sequential, seen: Mapping[str, Tensor]) -> nn.Sequential:
    """A copy without the channels that were closed throughout.

    The result is the network's function, up to rounding, on inputs that open none of the removed channels and close
    none of a layer whose gate goes. A channel whose gate group is zero is closed for every input; one that was closed
    on the examples seen may open on others.

    Args:
        network: sequential, with :class:`Gated` layers.
        seen: gates ``(n, channels)`` in {0, 1} by name of the gated layer, such as from ``observe_gates``.

    Raises:
        ConfigError: what reads a gated layer's channels cannot be found.
    """
    small = copy.deepcopy(network)
    for name, q in seen.items():
        parts = dict(small.named_modules())
        layer = parts.get(name)
        if not isinstance(layer, Gated):
            raise ConfigError(f"{name!r} is not a gated layer; gated are: {_gated(small)}")
        live = (q != 0).any(0).nonzero().squeeze(1)
        if not len(live):
            raise ConfigError(f"{name!r}: every channel is closed, nothing would be left of the layer")
        channels = q.shape[1]
        layer.body = cut_channels(layer.body, live)
        _cut_reader(small, layer, live, channels)
        layer.gate.open = _rows(layer.gate.open, live)
        if bool((q[:, live] != 0).all()):
            prefix, _, last = name.rpartition(".")
            setattr(parts[prefix], last, layer.body)
    return small


def _gated(network: nn.Module) -> str:
    return ", ".join(name for name, part in network.named_modules() if isinstance(part, Gated)) or "none"


def _cut_reader(network: nn.Sequential, layer: Gated, live: Tensor, channels: int) -> None:
    """The next convolution or linear layer, and the gate beside it, lose the inputs that are never there."""
    order = _flat(network)
    for part in order[order.index(layer) + 1 :]:
        inner = next(leaves(part.body)) if isinstance(part, Gated) else part
        if isinstance(inner, CONVOLUTIONS) and inner.in_channels == channels and inner.groups == 1:
            inner.weight = nn.Parameter(inner.weight.detach()[:, live])
            inner.in_channels = len(live)
            if isinstance(part, Gated):
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
