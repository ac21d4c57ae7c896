"""Layout: where each tensor of a model lies in one flat vector of P scalars."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from .errors import ConfigError

Role = Literal["weight", "bias", "norm", "other", "buffer"]

_WEIGHTED = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_NORM = (
    nn.modules.batchnorm._NormBase,  # BatchNorm*, InstanceNorm*, SyncBatchNorm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
)

MASKABLE: dict[str, tuple[Role, ...]] = {
    "conv_linear_weights": ("weight",),
    "all_but_norm": ("weight", "bias"),
    "all_trainable": ("weight", "bias", "norm", "other"),
}
"""Which roles a pruning method may mask (convention C2). Buffers are never masked."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layout: ``role`` says what it does in its module."""

    name: str
    shape: tuple[int, ...]
    role: Role = "other"

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Names, shapes and roles of a model's tensors: parameters in state-dict order, then float buffers.

    A *vector* of this layout is a float32 tensor of shape ``(P,)`` with ``P = size``; each tensor is laid out
    in C order. Integer buffers (``num_batches_tracked``) have no place in it and stay local.

    Attributes:
        entries: the tensors, in order.
        base: sha256 of the tensors that are part of the module but not of the layout (:func:`frozen`): every end
            makes them itself, and ends whose base differs have different fingerprints. Empty: there are none.
        skeleton: the network without its numbers (on torch's ``meta`` device), for what needs to know how tensors
            connect; None where only the tensors are known. Two layouts are equal whatever their skeletons.
    """

    tensors: tuple[TensorSpec, ...]
    base: str = ""
    skeleton: nn.Module | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_module(cls, module: nn.Module) -> Layout:
        """Layout of a module: all that is not its frozen base.

        Raises:
            ConfigError: a parameter is not float32.
        """
        roles, base = _roles(module), get_frozen_tensors(module)
        for name, p in module.named_parameters():
            if p.dtype != torch.float32:
                raise ConfigError(f"parameter {name!r} is {p.dtype}; expected torch.float32: call model.float()")
        parameters = [
            TensorSpec(n, tuple(p.shape), roles.get(n, "other")) for n, p in module.named_parameters() if n not in base
        ]
        buffers = [
            TensorSpec(n, tuple(b.shape), "buffer")
            for n, b in module.named_buffers()
            if b is not None and b.is_floating_point() and n not in base
        ]
        return cls(tuple(parameters + buffers), _digest(base), _skeleton(module))

    @cached_property
    def size(self) -> int:
        """P, the number of scalars."""
        return sum(entry.size for entry in self.tensors)

    @cached_property
    def trainable_size(self) -> int:
        """Number of scalars that are parameters; they come first in a vector, buffers after them."""
        return sum(entry.size for entry in self.tensors if entry.role != "buffer")

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that differ for any other names, shapes, roles, order or frozen base."""
        listed: list[object] = [[e.name, list(e.shape), e.role] for e in self.tensors]
        text = json.dumps(listed + ([self.base] if self.base else []), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each entry in a vector, and P at the end."""
        starts = [0]
        for entry in self.tensors:
            starts.append(starts[-1] + entry.size)
        return tuple(starts)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector ``(P,)`` of named tensors; a copy."""
        if not self.tensors:
            return torch.zeros(0)
        return torch.cat([tensors[entry.name].detach().reshape(-1) for entry in self.tensors])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of ``vector`` ``(P,)``, one per tensor; nothing is copied."""
        pieces = vector.split([entry.size for entry in self.tensors])
        return {e.name: piece.view(e.shape) for e, piece in zip(self.tensors, pieces, strict=True)}

    def select(self, wanted: Callable[[TensorSpec], bool]) -> Tensor:
        """Bool vector ``(P,)``: the entries of the tensors that satisfy ``wanted``."""
        on = torch.zeros(self.size, dtype=torch.bool)
        for entry, start in zip(self.tensors, self.offsets, strict=False):
            on[start : start + entry.size] = wanted(entry)
        return on


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy that shares nothing with the module and holds no numbers."""
    shapes: dict[int, Tensor] = {id(b): b.to("meta") for b in module.buffers()}
    shapes |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, shapes)


def get_frozen_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The base of an adapted network, by name: parameters that require no gradient, and with them the float buffers of
    modules that own no other parameter. Empty for a network that trains as a whole.
    """
    base = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    if not base:
        return base
    for prefix, part in module.named_modules():
        if all(not p.requires_grad for p in part.parameters(recurse=False)):
            base |= {n: b for n, b in part.named_buffers(prefix, recurse=False) if b.is_floating_point()}
    return base


def _digest(base: Mapping[str, Tensor]) -> str:
    if not base:
        return ""
    total = hashlib.sha256()
    for name, tensor in sorted(base.items()):
        total.update(f"{name}{tuple(tensor.shape)}".encode())
        total.update(tensor.cpu().contiguous().numpy().astype("<f4", copy=False).data)
    return total.hexdigest()


def _roles(module: nn.Module) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    for prefix, part in module.named_modules():
        for name, _ in part.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(part, _NORM):
                roles[full] = "norm"
            elif isinstance(part, _WEIGHTED) and name in ("weight", "bias"):
                roles[full] = "weight" if name == "weight" else "bias"
    return roles


def compute_digest(weights: Tensor) -> str:
    """sha256 of a vector's float32 bytes, little-endian."""
    return hashlib.sha256(weights.to(torch.float32).numpy().astype("<f4", copy=False).tobytes()).hexdigest()
