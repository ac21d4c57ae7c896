"""Layout of a model: the position of each of its tensors in one flat vector of P scalars."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .errors import ConfigError

Role = Literal["weight", "bias", "norm", "other", "path", "buffer"]

_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORM = (
    nn.modules.batchnorm._NormBase,  # BatchNorm*, InstanceNorm*, SyncBatchNorm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
)


class LinearPath(nn.Linear):
    """A linear model of the inputs beside hidden layers; it starts at zero, and no method masks it.

    It has a few hundred of many thousand weights. Masked, a sparse network could be worse than the linear model.
    """

    def reset_parameters(self) -> None:
        """Set all parameters to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


MASKABLE: dict[str, tuple[Role, ...]] = {
    "conv_linear_weights": ("weight",),
    "all_but_norm": ("weight", "bias"),
    "all_trainable": ("weight", "bias", "norm", "other"),
}
"""Roles that a pruning method may mask, by preset. Buffers and linear paths are never masked."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layout; ``role`` is its function within its module."""

    name: str
    shape: tuple[int, ...]
    role: Role = "other"

    @property
    def size(self) -> int:
        """Number of scalars."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Names, shapes and roles of a model's tensors: parameters in state-dict order, then float buffers.

    A *vector* of this layout is a float32 tensor of shape ``(P,)`` with ``P = size``; each tensor occupies a
    contiguous range of it, in C order. Integer buffers (``num_batches_tracked``) are not part of the vector and never
    leave a site.

    Attributes:
        tensors: the tensors, in the order of the vector.
        base_model_digest: sha256 of the frozen base model (:func:`get_frozen_tensors`), empty if there is none. Every
            endpoint builds the base model itself; the digest enters the fingerprint, so endpoints with different base
            models reject each other's messages.
        skeleton: the network on torch's ``meta`` device, that is without values, for code that needs to know how
            tensors connect; None if only the tensors are known. It takes no part in comparisons.

    Examples:
        >>> layout = Layout.from_module(nn.Linear(2, 1))
        >>> [(tensor.name, tensor.shape) for tensor in layout.tensors], layout.size
        ([('weight', (1, 2)), ('bias', (1,))], 3)
        >>> layout.unflatten(torch.tensor([1.0, 2.0, 3.0]))["bias"]
        tensor([3.])
    """

    tensors: tuple[TensorSpec, ...]
    base_model_digest: str = ""
    skeleton: nn.Module | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_module(cls, module: nn.Module) -> Layout:
        """Build the layout of a module, without its frozen base model.

        Raises:
            ConfigError: a parameter that trains is not float32, those of a frozen base model may have any type; or a
                tensor has no shape yet, or is quantised.
        """
        _check_tensors(module)
        roles, frozen = _find_roles(module), get_frozen_tensors(module)
        for name, p in module.named_parameters():
            if p.dtype != torch.float32 and name not in frozen:
                raise ConfigError(f"parameter {name!r} is {p.dtype}; expected torch.float32: call model.float()")
        parameters = [
            TensorSpec(name, tuple(p.shape), roles.get(name, "other"))
            for name, p in module.named_parameters()
            if name not in frozen
        ]
        # Integer buffers stay local: float32 would round large counters, and averages of counts have no meaning.
        buffers = [
            TensorSpec(name, tuple(b.shape), "buffer")
            for name, b in module.named_buffers()
            if b is not None and b.is_floating_point() and name not in frozen
        ]
        return cls(tuple(parameters + buffers), _compute_base_model_digest(frozen), _build_skeleton(module))

    def drop(self, names: Collection[str]) -> Layout:
        """Return the layout without some tensors; a network with them has that layout's fingerprint no more."""
        return replace(self, tensors=tuple(spec for spec in self.tensors if spec.name not in names))

    @cached_property
    def size(self) -> int:
        """P, the number of scalars."""
        return sum(spec.size for spec in self.tensors)

    @cached_property
    def num_parameters(self) -> int:
        """Number of the entries of parameters, which precede those of buffers in a vector."""
        return sum(spec.size for spec in self.tensors if spec.role != "buffer")

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits; layouts that differ in names, shapes, roles, order or base model have different ones."""
        rows: list[object] = [[spec.name, list(spec.shape), spec.role] for spec in self.tensors]
        digests = [self.base_model_digest] if self.base_model_digest else []
        return hashlib.sha256(json.dumps(rows + digests, separators=(",", ":")).encode()).hexdigest()[:32]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each tensor in a vector, followed by P."""
        starts = [0]
        for spec in self.tensors:
            starts.append(starts[-1] + spec.size)
        return tuple(starts)

    @cached_property
    def transposed_groups(self) -> dict[str, int]:
        """``groups`` of every transposed convolution by the name of its weight, ``(in, out / groups, ...)``."""
        if self.skeleton is None:
            return {}
        transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        modules = self.skeleton.named_modules()
        return {f"{name}.weight".lstrip("."): m.groups for name, m in modules if isinstance(m, transposed)}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy named tensors into one vector ``(P,)``."""
        if not self.tensors:
            return torch.zeros(0)
        return torch.cat([tensors[spec.name].detach().reshape(-1) for spec in self.tensors])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of ``vector`` ``(P,)``, one per tensor; nothing is copied."""
        pieces = vector.split([spec.size for spec in self.tensors])
        return {spec.name: piece.view(spec.shape) for spec, piece in zip(self.tensors, pieces, strict=True)}

    def select(self, predicate: Callable[[TensorSpec], bool]) -> Tensor:
        """Return a bool vector ``(P,)``: the entries of the tensors that satisfy ``predicate``."""
        bits = torch.zeros(self.size, dtype=torch.bool)
        for spec, start in zip(self.tensors, self.offsets, strict=False):
            bits[start : start + spec.size] = predicate(spec)
        return bits


def _build_skeleton(module: nn.Module) -> nn.Module:
    """Copy a module onto the ``meta`` device: the copy holds no values and shares nothing with the module."""
    # deepcopy takes the second argument as its memo: each tensor is replaced by its meta twin instead of being copied.
    memo: dict[int, Tensor] = {id(b): b.to("meta") for b in module.buffers()}
    # The older weight norm keeps a weight that is computed from parameters, which cannot be copied.
    kept = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    memo |= {id(tensor): tensor.detach().to("meta") for tensor in kept}
    memo |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def get_frozen_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the frozen base model under adapters, by name; empty if every parameter trains.

    These are the parameters that require no gradient, and the float buffers of every module that owns no trainable
    parameter.
    """
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    if not frozen:
        return frozen
    for prefix, part in module.named_modules():
        if all(not p.requires_grad for p in part.parameters(recurse=False)):
            frozen |= {name: b for name, b in part.named_buffers(prefix, recurse=False) if b.is_floating_point()}
    return frozen


def match_state_dict(module: nn.Module) -> dict[str, str]:
    """Return which parameter or buffer of a module each name of its ``state_dict()`` stands for.

    The two names differ where a class overrides ``state_dict``, as a wrapper does that gives the names of the network
    inside it. They are matched by the memory that they share. An entry that is no tensor of the module, such as a copy
    under another name, is left out.
    """
    _check_tensors(module)
    own = dict([*module.named_parameters(), *module.named_buffers()])
    names = {_locate(tensor): name for name, tensor in reversed(own.items())}
    matches = {}
    for name, value in module.state_dict().items():
        place = _locate(value) if isinstance(value, Tensor) else None
        # Tensors without entries share a place.
        if name in own and (place == _locate(own[name]) or place not in names):
            matches[name] = name
        elif place in names:
            matches[name] = names[place]
    return matches


def _locate(tensor: Tensor) -> tuple[object, ...]:
    """Return what two tensors of the same memory have in common; a transposed view is another tensor."""
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _compute_base_model_digest(frozen: Mapping[str, Tensor]) -> str:
    if not frozen:
        return ""
    digest = hashlib.sha256()
    for name, tensor in sorted(frozen.items()):
        # Equal values of another type are another model: products of bfloat16 are rounded.
        kind = "" if tensor.dtype == torch.float32 else str(tensor.dtype)
        digest.update(f"{name}{tuple(tensor.shape)}{kind}".encode())
        # numpy has no bfloat16; float32 holds each of its values.
        digest.update(tensor.cpu().float().contiguous().numpy().astype("<f4", copy=False).data)
    return digest.hexdigest()


def _check_tensors(module: nn.Module) -> None:
    """Refuse layers without weights of a fixed shape.

    Raises:
        ConfigError: a layer is lazy or quantised: its weights have no shape yet, or are no parameters.
    """
    for name, part in module.named_modules():
        where = f"layer {name!r} is {type(part).__name__}"
        if any(is_lazy(tensor) for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            raise ConfigError(
                f"{where}, whose weights have no shape before the first batch; server and sites need the same shapes "
                "without data: give the number of inputs, such as nn.Linear(12, 16) for nn.LazyLinear(16), or pass a "
                "batch of zeros through the network in its __init__"
            )
        if ".quantized" in type(part).__module__:
            raise ConfigError(
                f"{where}, whose weights are quantised and do not train; quantise the final model instead"
            )


def _find_roles(module: nn.Module) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    for prefix, part in module.named_modules():
        for name, _ in part.named_parameters(recurse=False):
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(part, _NORM):
                roles[path] = "norm"
            elif isinstance(part, LinearPath):
                roles[path] = "path"
            elif isinstance(part, _WEIGHTED) and name in ("weight", "bias"):
                roles[path] = "weight" if name == "weight" else "bias"
    return roles


def compute_digest(weights: Tensor) -> str:
    """Return the sha256 of a vector's little-endian float32 bytes."""
    return hashlib.sha256(weights.to(torch.float32).numpy().astype("<f4", copy=False).tobytes()).hexdigest()


def separate_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, which safetensors refuses; only those that do are copied."""
    separate: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        part = tensor.detach().contiguous()
        if part.untyped_storage().nbytes() != part.nbytes or part.data_ptr() in addresses:
            part = part.clone()
        addresses.add(part.data_ptr())
        separate[name] = part
    return separate
