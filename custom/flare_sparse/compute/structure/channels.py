"""Compute only some output channels of a block with one convolution, or cut the others out of it."""

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
"""Modules allowed in a gated block beside convolution and norm: they act on each channel alone and map 0 to 0."""


def iterate_leaf_modules(body: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of nested ``nn.Sequential`` blocks in the order in which they run."""
    if isinstance(body, nn.Sequential):
        for part in body:
            yield from iterate_leaf_modules(part)
    else:
        yield body


def run_channels(body: nn.Module, x: Tensor, live: Tensor) -> Tensor:
    """Compute only the output channels ``live`` (indices) of a block, ``(B, len(live), ...)``."""
    for part in iterate_leaf_modules(body):
        if isinstance(part, CONVOLUTIONS):
            x = part._conv_forward(x, part.weight[live], None if part.bias is None else part.bias[live])
        elif isinstance(part, NORMS):
            x = _normalize_channels(part, x, live)
        else:
            x = part(x)
    return x


def _normalize_channels(part: Any, x: Tensor, live: Tensor) -> Tensor:
    """Apply a norm of :data:`NORMS` to some of its channels."""
    # Indexing copies the running statistics, so updates to them would be lost: callers use this only in eval mode or
    # without running statistics (see Gated.forward).
    tensors = (part.running_mean, part.running_var, part.weight, part.bias)
    mean, var, weight, bias = (None if p is None else p[live] for p in tensors)
    if isinstance(part, INSTANCE_NORMS):
        return functional.instance_norm(x, mean, var, weight, bias, use_input_stats=mean is None, eps=part.eps)
    return functional.batch_norm(x, mean, var, weight, bias, training=mean is None, eps=part.eps)


def keep_entries(part: nn.Module, live: Tensor, *names: str) -> None:
    """Keep only the indices ``live`` along the first axis of the named parameters and buffers, in place."""
    for name in names:
        tensor = getattr(part, name, None)
        if isinstance(tensor, nn.Parameter):
            setattr(part, name, nn.Parameter(tensor.detach()[live].clone(), requires_grad=tensor.requires_grad))
        elif isinstance(tensor, torch.Tensor):
            setattr(part, name, tensor[live].clone())


def cut_channels(body: nn.Module, live: Tensor) -> nn.Module:
    """Return a copy of a block with only the output channels ``live`` (indices)."""
    small = copy.deepcopy(body)
    for part in iterate_leaf_modules(small):
        if isinstance(part, CONVOLUTIONS):
            keep_entries(part, live, "weight", "bias")
            part.out_channels = len(live)
        elif isinstance(part, NORMS):
            keep_entries(part, live, "weight", "bias", "running_mean", "running_var")
            part.num_features = len(live)
    return small
