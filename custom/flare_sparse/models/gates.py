"""Channel gates (MetaGater, Lin et al. 2021, section 3.1 and appendix F): per example, which channels of a layer live.

:func:`gated` wraps a convolution, or a block of one convolution with its normalisation, activation and pooling, into a
:class:`Gated`: ``Q(x) (.) body(x)`` with ``Q(x)`` in {0, 1} per example and output channel. The gate comes after the
normalisation, which would otherwise rescale the survivors and turn a closed channel into its bias.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigError, suggest
from ..structure.channels import CHANNELWISE, CONVOLUTIONS, NORMS, leaves, run_channels


class GateConfig(BaseModel):
    """Which layers of a network are gated, and how. Symbols as in the paper's appendix F."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="names of convolutions, or of blocks with one convolution, such as '2'"
    )
    hidden: int = Field(16, ge=1, le=4096, description="units of a gate's hidden layer")
    open_bias: float = Field(
        1.0, description="bias of the logits at the start; at 1 all channels are open and stay so long"
    )
    temperature: float = Field(1.0, gt=0, description="tau of the backward sigmoid")
    noise: bool = Field(False, description="logistic noise on the logits while training (Gumbel softmax)")
    detach_input: bool = Field(False, description="no gradient from a gate into the layers before it")


class ChannelGate(nn.Module):
    """Global average pooling, Linear to ``hidden``, ReLU, Linear to one logit z a channel; open where z > 0.

    Backward, the derivative of ``sigmoid(z / temperature)`` (straight-through). The bias of the last layer
    starts at ``open_bias``: well above 0, all channels are open.
    """

    def __init__(self, inputs: int, outputs: int, config: GateConfig):
        super().__init__()
        self.temperature, self.detach_input = config.temperature, config.detach_input
        self.hidden = nn.Linear(inputs, config.hidden)
        self.open = nn.Linear(config.hidden, outputs)
        self.noise = LogisticNoise() if config.noise else nn.Identity()
        nn.init.constant_(self.open.bias, config.open_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Gates ``(B, outputs)`` in {0, 1} of a feature map ``(B, inputs, ...)``."""
        pooled = x.flatten(2).mean(2)
        z = self.open(functional.relu(self.hidden(pooled.detach() if self.detach_input else pooled)))
        return straight_through(self.noise(z), self.temperature)


def straight_through(z: Tensor, temperature: float = 1.0) -> Tensor:
    """1 where ``z > 0``, else 0; the gradient is that of ``sigmoid(z / temperature)``."""
    hard = (z > 0).to(z.dtype)
    if not (torch.is_grad_enabled() and z.requires_grad):
        return hard
    soft = torch.sigmoid(z / temperature)
    return hard + (soft - soft.detach())


class LogisticNoise(nn.modules.dropout._DropoutNd):
    """Adds Logistic(0, 1) noise, the difference of two Gumbel variables; a kind of dropout: off wherever that is."""

    def __init__(self) -> None:
        super().__init__(p=0.0)

    def forward(self, z: Tensor) -> Tensor:
        """``z`` with noise while training, else ``z``."""
        return z + torch.logit(torch.rand_like(z), eps=1e-6) if self.training else z


class Gated(nn.Module):
    """A block whose output channels its gate opens and closes for each example.

    Without gradients, channels that are closed for a whole batch are not computed. While all are open the output is the block's, bit for
    bit; else the smaller convolution may round differently.
    """

    def __init__(self, body: nn.Module, gate: ChannelGate):
        super().__init__()
        self.body, self.gate = body, gate

    def forward(self, x: Tensor) -> Tensor:
        """``(B, channels, ...)``."""
        if torch.is_grad_enabled() or _counts_examples(self.body):  # a closed gate, too, has a gradient
            out = self.body(x)
            return _times(out, self.gate(x))
        q = self.gate(x)
        live = q.any(0)
        if bool(live.all()):
            return _times(self.body(x), q)
        live[0] |= not bool(live.any())  # the map's size must come from some channel
        return self._skipping(x, q, live.nonzero().squeeze(1))

    def _skipping(self, x: Tensor, q: Tensor, live: Tensor) -> Tensor:
        shared = q[:, live]
        small = run_channels(self.body, x, live)
        small = small if bool(shared.all()) else _times(small, shared)
        full = small.new_zeros((small.shape[0], q.shape[1], *small.shape[2:]))
        return full.index_copy_(1, live, small)


def _times(out: Tensor, q: Tensor) -> Tensor:
    return out * q.reshape(*q.shape, *[1] * (out.dim() - 2))


def _counts_examples(body: nn.Module) -> bool:
    """Whether the block keeps running statistics of what it sees, so that every channel must see it."""
    return any(isinstance(part, NORMS) and part.training and part.track_running_stats for part in leaves(body))


def gated(network: nn.Module, config: GateConfig) -> nn.Module:
    """The network with its layers ``config.layers`` wrapped, in place; the weights of the backbone stay as they are.

    Raises:
        ConfigError: no such layer, not one convolution in it, a part that a gate cannot go around, or a norm behind it.
    """
    if twice := [name for name in config.layers if config.layers.count(name) > 1]:
        raise ConfigError(f"gates.layers: {twice[0]!r} is named twice; name a layer once")
    for name in config.layers:
        known = dict(network.named_modules())
        if name not in known or not name:
            raise ConfigError(f"gates.layers: the network has no layer {name!r}.{suggest(name, known)}")
        body = known[name]
        convolution = _convolution(name, body)
        prefix, _, last = name.rpartition(".")
        parent = known[prefix]
        _no_norm_behind(name, parent, body)
        setattr(parent, last, Gated(body, ChannelGate(convolution.in_channels, convolution.out_channels, config)))
    return network


def _convolution(name: str, body: nn.Module) -> nn.Conv2d | nn.Conv3d:
    parts = list(leaves(body))
    found = [part for part in parts if isinstance(part, CONVOLUTIONS)]
    if len(found) != 1 or parts[0] is not found[0]:
        raise ConfigError(
            f"gates.layers: {name!r} holds {len(found)} convolutions; name one, or a block that begins with it"
        )
    allowed = (*CONVOLUTIONS, *NORMS, *CHANNELWISE)
    if odd := [type(part).__name__ for part in parts if not isinstance(part, allowed)]:
        raise ConfigError(
            f"gates.layers: {name!r} holds {odd[0]}, which mixes channels or moves 0; gate a smaller block"
        )
    if found[0].groups != 1:
        raise ConfigError(f"gates.layers: {name!r} is a grouped convolution; gate one with groups=1")
    return found[0]


def _no_norm_behind(name: str, parent: nn.Module, body: nn.Module) -> None:
    children = list(parent.children())
    following = children[children.index(body) + 1 :]
    first = next((leaf for part in following for leaf in leaves(part)), None)
    mixing = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
    if isinstance(first, mixing):
        raise ConfigError(
            f"gates.layers: {name!r} is followed by {type(first).__name__}, which would turn a closed channel into its "
            "bias; gate the block that holds both"
        )
