"""Some output channels of a block of one convolution: computed alone, or cut out of it for good."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
INSTANCE_NORMS = (nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*INSTANCE_NORMS, nn.BatchNorm2d, nn.BatchNorm3d)
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
"""What may stand in a gated block beside convolution and norm: works on each channel alone and keeps 0 at 0."""


def leaves(body: nn.Module) -> Iterator[nn.Module]:
    """The parts of a block in the order in which they run."""
    if isinstance(body, nn.Sequential):
        for part in body:
            yield from leaves(part)
    else:
        yield body


def run_channels(body: nn.Module, x: Tensor, live: Tensor) -> Tensor:
    """The output channels ``live`` (indices) of a block, ``(B, len(live), ...)``; the others are not computed."""
    for part in leaves(body):
        if isinstance(part, CONVOLUTIONS):
            x = part._conv_forward(x, part.weight[live], None if part.bias is None else part.bias[live])
        elif isinstance(part, NORMS):
            x = _normalised(part, x, live)
        else:
            x = part(x)
    return x


def _normalised(part: Any, x: Tensor, live: Tensor) -> Tensor:
    """A norm of :data:`NORMS` on some of its channels; with running statistics only when it does not update them."""
    chosen = (part.running_mean, part.running_var, part.weight, part.bias)
    mean, var, weight, bias = (None if p is None else p[live] for p in chosen)
    if isinstance(part, INSTANCE_NORMS):
        return functional.instance_norm(x, mean, var, weight, bias, use_input_stats=mean is None, eps=part.eps)
    return functional.batch_norm(x, mean, var, weight, bias, training=mean is None, eps=part.eps)


def keep(part: nn.Module, live: Tensor, *names: str) -> None:
    """Leave only the entries ``live`` along the first axis of these parameters and buffers."""
    for name in names:
        tensor = getattr(part, name, None)
        if isinstance(tensor, nn.Parameter):
            setattr(part, name, nn.Parameter(tensor.detach()[live].clone(), requires_grad=tensor.requires_grad))
        elif isinstance(tensor, torch.Tensor):
            setattr(part, name, tensor[live].clone())


def cut_channels(body: nn.Module, live: Tensor) -> nn.Module:
    """A copy of a block with the output channels ``live`` (indices) only."""
    small = copy.deepcopy(body)
    for part in leaves(small):
        if isinstance(part, CONVOLUTIONS):
            keep(part, live, "weight", "bias")
            part.out_channels = len(live)
        elif isinstance(part, NORMS):
            keep(part, live, "weight", "bias", "running_mean", "running_var")
            part.num_features = len(live)
    return small
