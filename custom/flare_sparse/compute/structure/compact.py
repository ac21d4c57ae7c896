"""Smaller copies of networks, without the channels that no gate opens and the units that compute nothing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.params import Layout
from .graph import Untraceable
from .removal import RemovableLayer, cut_units, remove_silent_units

CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
NORMS = (nn.InstanceNorm2d, nn.InstanceNorm3d, nn.BatchNorm2d, nn.BatchNorm3d)
CHANNELWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.Identity,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.modules.dropout._DropoutNd,
)
"""Modules allowed in a gated block beside convolution and norm: they act on each channel alone and map 0 to 0."""


def iterate_leaf_modules(body: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of nested ``nn.Sequential`` blocks in the order in which they run."""
    if isinstance(body, nn.Sequential):
        for part in body:
            yield from iterate_leaf_modules(part)
    else:
        yield body


def compact_model(model: nn.Module) -> nn.Module:
    """Return a copy without the units and channels that are off for every input; it computes the same function.

    Of a gated network these are the channels that no input opens, of any other the units whose weights, bias and
    norm are all zero.

    Raises:
        ConfigError: there is none, or the network's channels cannot be traced.
    """
    if isinstance(model, nn.Sequential) and any(map(is_gated, model.modules())):
        closed = list(_find_closed_channels(model))
        smaller = cut_units(model, [layer for layer, _ in closed], [kept for _, kept in closed])
    else:
        try:
            smaller = remove_silent_units(model)
        except Untraceable as error:
            raise ConfigError(f"no smaller network can be built: {error}") from error
    before, after = (Layout.from_module(network).size for network in (model, smaller))
    if after == before:
        raise ConfigError(
            "no unit or channel of this network is off as a whole, so no smaller network computes the same; methods "
            "that remove units (scbfwp, fawp) or close channels (metagater) make such models; save --format sparse "
            "stores any"
        )
    return smaller.eval()


def _is_never_open(logits: nn.Module) -> Tensor:
    """Return the channels whose logit is at most 0 for every input of a gate's last layer, bool ``(channels,)``."""
    # Its inputs come from a ReLU: without a positive weight or bias no input opens the channel.
    weight, bias = logits.get_parameter("weight"), logits.get_parameter("bias")
    return (torch.cat([weight, bias[:, None]], dim=1) <= 0).all(1)


def is_gated(part: Any) -> bool:
    """Return whether a module is a block with a channel gate, as ``tasks/models/gates.py`` builds them."""
    return isinstance(part, nn.Module) and {"body", "gate"} <= {name for name, _ in part.named_children()}


def _find_closed_channels(network: nn.Sequential) -> Iterator[tuple[RemovableLayer, Tensor]]:
    """Yield each gated layer that has channels which no input opens, and the other channels, bool ``(channels,)``.

    Raises:
        ConfigError: no layer that can be cut reads the channels.
    """
    modules = {name: part for name, part in network.named_modules() if not isinstance(part, nn.Sequential)}
    inside = tuple(f"{name}." for name, part in modules.items() if is_gated(part))
    order = [name for name in modules if not name.startswith(inside)]
    for place, name in enumerate(order):
        if not is_gated(modules[name]):
            continue
        closed = _is_never_open(modules[f"{name}.gate.open"])
        # A layer of which nothing is cut needs no reader that can be cut.
        if not bool(closed.any()):
            continue
        inner = [path for path in modules if path.startswith(f"{name}.body")]
        convolution = next(path for path in inner if isinstance(modules[path], CONVOLUTIONS))
        norms = [path for path in inner if isinstance(modules[path], NORMS)]
        readers = _find_readers(modules, order[place + 1 :], len(closed))
        # A channel that is closed for every input serves as the one that a layer keeps at least.
        closed[0] &= not bool(closed.all())
        yield RemovableLayer(convolution, len(closed), (*norms, f"{name}.gate.open"), readers, ()), ~closed


def _find_readers(modules: Mapping[str, Any], following: Sequence[str], channels: int) -> tuple[str, ...]:
    """Return the next convolution or linear layer, and the hidden layer of its gate."""
    for name in following:
        part, first, gate = modules[name], name, tuple[str, ...]()
        if is_gated(part):
            first = next(path for path in modules if path.startswith(f"{name}.body"))
            gate = (f"{name}.gate.hidden",)
        inner = modules[first]
        if isinstance(inner, CONVOLUTIONS) and inner.in_channels == channels and inner.groups == 1:
            return (first, *gate)
        if isinstance(inner, nn.Linear) and inner.in_features % channels == 0:
            return (first,)
        if not isinstance(inner, (*CHANNELWISE, nn.Flatten)):
            break
    raise ConfigError("the channels of a gated layer must be read by the next convolution (groups=1) or linear layer")
