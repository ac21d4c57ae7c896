"""Channel gates, which open or close the channels of a layer for each example.

Source: MetaGater, Lin et al. 2021, section 3.1 and appendix F; docs/algorithms.md, section 6.2. :func:`add_gates`
replaces a convolution, or a block of one convolution with its normalisation, activation and pooling, by a
:class:`Gated`: ``Q(x) (.) body(x)`` with ``Q(x)`` in {0, 1} per example and output channel. The gate is applied after
the normalisation, which would otherwise rescale the open channels and turn a closed channel into its bias.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from ...compute.structure.compact import CHANNELWISE, CONVOLUTIONS, NORMS, iterate_leaf_modules
from ...core.errors import ConfigError, suggest
from ...core.settings import Settings


class GateConfig(Settings):
    """Gated layers of a network and settings of their gates, with the symbols of the paper's appendix F."""

    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    """names of convolutions, or of blocks with one convolution, such as '2'"""
    hidden: int = Field(16, ge=1, le=4096)
    """units of a gate's hidden layer"""
    open_bias: float = 1.0
    """initial bias of the logits; at 1 all channels start open and close only slowly"""
    temperature: float = Field(1.0, gt=0)
    """tau of the sigmoid of the backward pass"""
    noise: bool = False
    """logistic noise on the logits while training (Gumbel softmax)"""
    detach_input: bool = False
    """pass no gradient from a gate to the layers before it"""


class ChannelGate(nn.Module):
    """A gate: global average pooling, linear layer, ReLU, linear layer to one logit z per channel; open where z > 0.

    The backward pass uses the derivative of ``sigmoid(z / temperature)`` (straight-through estimator). The bias of the
    last layer starts at ``open_bias``; well above 0, all channels start open.
    """

    def __init__(self, inputs: int, outputs: int, config: GateConfig):
        super().__init__()
        self.temperature, self.detach_input = config.temperature, config.detach_input
        self.hidden = nn.Linear(inputs, config.hidden)
        self.open = nn.Linear(config.hidden, outputs)
        self.noise = LogisticNoise() if config.noise else nn.Identity()
        nn.init.constant_(self.open.bias, config.open_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the gates ``(B, outputs)`` in {0, 1} for a feature map ``(B, inputs, ...)``."""
        pooled = x.flatten(2).mean(2)
        z = self.open(functional.relu(self.hidden(pooled.detach() if self.detach_input else pooled)))
        return binarize_straight_through(self.noise(z), self.temperature)


def binarize_straight_through(z: Tensor, temperature: float = 1.0) -> Tensor:
    """Return 1 where ``z > 0`` and 0 elsewhere, with the gradient of ``sigmoid(z / temperature)``."""
    hard = (z > 0).to(z.dtype)
    if not (torch.is_grad_enabled() and z.requires_grad):
        return hard
    soft = torch.sigmoid(z / temperature)
    return hard + (soft - soft.detach())


class LogisticNoise(nn.modules.dropout._DropoutNd):
    """Adds Logistic(0, 1) noise, the difference of two Gumbel variables, in training mode.

    A subclass of torch's dropout base class, so that code that disables dropout disables the noise too.
    """

    def __init__(self) -> None:
        super().__init__(p=0.0)

    def forward(self, z: Tensor) -> Tensor:
        """Return ``z`` with noise in training mode, else ``z``."""
        return z + torch.logit(torch.rand_like(z), eps=1e-6) if self.training else z


class Gated(nn.Module):
    """A block whose output channels are opened and closed by a gate for each example."""

    def __init__(self, body: nn.Module, gate: ChannelGate):
        super().__init__()
        self.body, self.gate = body, gate

    def forward(self, x: Tensor) -> Tensor:
        """Return the gated output ``(B, channels, ...)``."""
        out, q = self.body(x), self.gate(x)
        gated: Tensor = out * q.reshape(*q.shape, *[1] * (out.dim() - 2))
        return gated


def add_gates(network: nn.Module, config: GateConfig) -> nn.Module:
    """Add gates to the layers ``config.layers`` of a network, in place; the weights of the backbone do not change.

    Raises:
        ConfigError: a layer is named twice, does not exist, does not begin with its only convolution, contains a module
            that cannot be gated, or is followed by a norm.
    """
    if repeated := [name for name in config.layers if config.layers.count(name) > 1]:
        raise ConfigError(f"gates.layers: {repeated[0]!r} is named twice; name a layer once")
    for name in config.layers:
        modules = dict(network.named_modules())
        if name not in modules or not name:
            raise ConfigError(f"gates.layers: the network has no layer {name!r}.{suggest(name, modules)}")
        body = modules[name]
        convolution = _find_convolution(name, body)
        prefix, _, last = name.rpartition(".")
        parent = modules[prefix]
        _require_no_norm_after(name, parent, body)
        setattr(parent, last, Gated(body, ChannelGate(convolution.in_channels, convolution.out_channels, config)))
    return network


def _find_convolution(name: str, body: nn.Module) -> nn.Conv2d | nn.Conv3d:
    parts = list(iterate_leaf_modules(body))
    convolutions = [part for part in parts if isinstance(part, CONVOLUTIONS)]
    if len(convolutions) != 1 or parts[0] is not convolutions[0]:
        raise ConfigError(
            f"gates.layers: {name!r} holds {len(convolutions)} convolutions; name one, or a block that begins with it"
        )
    allowed = (*CONVOLUTIONS, *NORMS, *CHANNELWISE)
    if forbidden := [type(part).__name__ for part in parts if not isinstance(part, allowed)]:
        raise ConfigError(
            f"gates.layers: {name!r} holds {forbidden[0]}, which mixes channels or changes 0; gate a smaller block"
        )
    if convolutions[0].groups != 1:
        raise ConfigError(f"gates.layers: {name!r} is a grouped convolution; gate one with groups=1")
    return convolutions[0]


def _require_no_norm_after(name: str, parent: nn.Module, body: nn.Module) -> None:
    children = list(parent.children())
    following = children[children.index(body) + 1 :]
    first = next((leaf for part in following for leaf in iterate_leaf_modules(part)), None)
    norms = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
    if isinstance(first, norms):
        raise ConfigError(
            f"gates.layers: {name!r} is followed by {type(first).__name__}, which would turn a closed channel into its "
            "bias; gate the block that holds both"
        )
