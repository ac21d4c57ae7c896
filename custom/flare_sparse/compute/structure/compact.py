"""Smaller copies of networks, without the channels that no gate opens and the units that compute nothing."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.params import Layout
from .graph import Untraceable
from .removal import remove_silent_units

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


def keep_entries(part: nn.Module, live: Tensor, *names: str) -> None:
    """Keep only the indices ``live`` along the first axis of the named parameters and buffers, in place."""
    for name in names:
        tensor = getattr(part, name, None)
        if isinstance(tensor, nn.Parameter):
            setattr(part, name, nn.Parameter(tensor.detach()[live].clone(), requires_grad=tensor.requires_grad))
        elif isinstance(tensor, torch.Tensor):
            setattr(part, name, tensor[live].clone())


def cut_channels(body: nn.Module, live: Tensor) -> None:
    """Keep only the output channels ``live`` (indices) of a block, in place."""
    for part in iterate_leaf_modules(body):
        if isinstance(part, CONVOLUTIONS):
            keep_entries(part, live, "weight", "bias")
            part.out_channels = len(live)
        elif isinstance(part, NORMS):
            keep_entries(part, live, "weight", "bias", "running_mean", "running_var")
            part.num_features = len(live)


def compact_model(model: nn.Module) -> nn.Module:
    """Return a copy without the units and channels that are off for every input; it computes the same function.

    Of a gated network these are the channels that no input opens, of any other the units whose weights, bias and
    norm are all zero.

    Raises:
        ConfigError: there is none, or the network's channels cannot be traced.
    """
    gated = {name: part for name, part in model.named_modules() if is_gated(part)}
    if gated and isinstance(model, nn.Sequential):
        closed = {name: _is_never_open(part.get_submodule("gate.open")) for name, part in gated.items()}
        gated_copy = copy.deepcopy(model)
        for name, channels in closed.items():
            # A layer of which nothing is cut needs no reader that can be cut.
            if bool(channels.any()):
                _cut_gated_layer(gated_copy, name, ~channels)
        smaller: nn.Module = gated_copy
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


def compact_network(network: nn.Sequential, observed: Mapping[str, Tensor]) -> nn.Sequential:
    """Return a copy of a gated network without the channels that were closed for all observed examples.

    A layer whose remaining channels were open for all examples loses its gate. Up to rounding, the copy computes the
    same function on every input that opens none of the removed channels and closes none of a layer without a gate. A
    channel whose gate group is zero is closed for every input; one that was closed on the observed examples may open
    on others.

    Args:
        network: sequential network with gated layers, which are modules with a ``body`` and a ``gate``.
        observed: gates ``(n, channels)`` in {0, 1} by name of the gated layer, such as from ``observe_gates``.

    Raises:
        ConfigError: the layer that reads a gated layer's channels is not supported.
    """
    small = copy.deepcopy(network)
    for name, q in observed.items():
        _cut_gated_layer(small, name, (q != 0).any(0))
        if bool(((q != 0).any(0) == (q != 0).all(0)).all()):
            _remove_gate(small, name)
    return small


def is_gated(part: Any) -> bool:
    """Return whether a module is a block with a channel gate, as ``tasks/models/gates.py`` builds them."""
    return isinstance(part, nn.Module) and {"body", "gate"} <= {name for name, _ in part.named_children()}


def _cut_gated_layer(network: nn.Sequential, name: str, channels: Tensor) -> None:
    """Keep only ``channels`` (bool) of a gated layer and of the layer that reads it, in place."""
    layer: Any = dict(network.named_modules()).get(name)
    if not is_gated(layer):
        raise ConfigError(f"{name!r} is not a gated layer; gated layers: {_list_gated_layers(network)}")
    live = channels.nonzero().squeeze(1)
    if not len(live):
        raise ConfigError(f"{name!r}: every channel is closed, so no channel of the layer would remain")
    cut_channels(layer.body, live)
    _cut_reader(network, layer, live, len(channels))
    keep_entries(layer.gate.open, live, "weight", "bias")
    layer.gate.open.out_features = len(live)


def _remove_gate(network: nn.Sequential, name: str) -> None:
    """Replace a gated layer by its body, in place."""
    parts = dict(network.named_modules())
    prefix, _, last = name.rpartition(".")
    layer = parts[name]
    assert is_gated(layer)
    setattr(parts[prefix], last, layer.body)


def _list_gated_layers(network: nn.Module) -> str:
    return ", ".join(name for name, part in network.named_modules() if is_gated(part)) or "none"


def _cut_reader(network: nn.Sequential, layer: nn.Module, live: Tensor, channels: int) -> None:
    """Remove the cut channels from the inputs of the next convolution or linear layer, and of its gate."""
    order: list[Any] = _list_parts(network)
    for part in order[order.index(layer) + 1 :]:
        inner = next(iterate_leaf_modules(part.body)) if is_gated(part) else part
        if isinstance(inner, CONVOLUTIONS) and inner.in_channels == channels and inner.groups == 1:
            inner.weight = nn.Parameter(inner.weight.detach()[:, live])
            inner.in_channels = len(live)
            if is_gated(part):
                _keep_input_columns(part.gate.hidden, live, channels)
            return
        if isinstance(inner, nn.Linear) and inner.in_features % channels == 0:
            _keep_input_columns(inner, live, channels)
            return
        if not isinstance(inner, (*CHANNELWISE, nn.Flatten)):
            break
    raise ConfigError("the channels of a gated layer must be read by the next convolution (groups=1) or linear layer")


def _list_parts(network: nn.Module) -> list[nn.Module]:
    return [leaf for part in network.children() for leaf in iterate_leaf_modules(part)]


def _keep_input_columns(linear: nn.Linear, live: Tensor, channels: int) -> None:
    """Keep only the input columns of the channels ``live``, in place."""
    # In a flattened feature map each channel is a run of in_features / channels columns.
    weight = linear.weight.detach().unflatten(1, (channels, -1))[:, live].flatten(1)
    linear.weight, linear.in_features = nn.Parameter(weight.contiguous()), weight.shape[1]
