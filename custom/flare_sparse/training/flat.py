"""A network whose parameters and gradients are views of one vector each.

Masks, clipping and optimisers operate on a single tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..params import Layout, get_frozen_tensors
from .personal import PersonalTensors


class FlatModel:
    """A module bound to vectors of a layout.

    Parameters and buffers outside the layout, those of a frozen base model, keep their values.

    Args:
        module: the network; it is modified and moved to ``device``.
        layout: its layout.
        device: where to compute.

    Attributes:
        module: the network; its parameters are views of ``flat``.
        flat: parameter ``(layout.trainable_size,)`` that an optimiser steps.
        personal: tensors outside the layout that stay at the site; None: there are none.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device | str = "cpu"):
        self.layout, self.device = layout, torch.device(device)
        self.module = module.to(self.device)
        self.personal: PersonalTensors | None = None
        self.flat = nn.Parameter(torch.zeros(layout.trainable_size, device=self.device))
        self.flat.grad = torch.zeros_like(self.flat)
        parameters = dict(self.module.named_parameters())
        self._parameters: list[tuple[nn.Parameter, slice]] = []
        self._buffers = dict(self.module.named_buffers())
        self._initial_integer_buffers = {
            name: b.clone() for name, b in self._buffers.items() if b is not None and not b.is_floating_point()
        }
        frozen = get_frozen_tensors(self.module)
        self._modules_with_frozen_buffers = [
            part
            for prefix, part in self.module.named_modules()
            if any(name in frozen for name, _ in part.named_buffers(prefix, recurse=False))
        ]
        for spec, start in zip(layout.tensors, layout.offsets, strict=False):
            if spec.role == "buffer":
                continue
            parameter, positions = parameters[spec.name], slice(start, start + spec.size)
            parameter.data = self.flat.data[positions].view(spec.shape)
            parameter.grad = self.flat.grad[positions].view(spec.shape)
            self._parameters.append((parameter, positions))

    @property
    def gradient(self) -> Tensor:
        """The gradient ``(trainable_size,)``; the parameters' own gradients are views of it."""
        assert self.flat.grad is not None
        return self.flat.grad

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        """Set parameters and float buffers from a vector ``(P,)``; reset integer buffers to their initial values."""
        self.flat.copy_(vector[: self.layout.trainable_size])
        for spec, start in zip(self.layout.tensors, self.layout.offsets, strict=False):
            if spec.role == "buffer":
                self._buffers[spec.name].copy_(vector[start : start + spec.size].view(spec.shape))
        # Integer buffers (num_batches_tracked) are not part of a vector. A counter left from an earlier round would
        # make the result depend on what this process has trained before, and a resumed run differ from the original.
        for name, initial in self._initial_integer_buffers.items():
            self._buffers[name].copy_(initial)
        # With every vector: what an evaluation or a trial did to them must not last.
        if self.personal is not None:
            self.personal.load()

    def set_training_mode(self, trainable: Tensor | None = None) -> None:
        """Put the module in training mode; modules with frozen buffers stay in eval mode, so that these do not drift.

        Args:
            trainable: bool ``(trainable_size,)``: a tensor without a trainable entry gets no gradient, which saves its
                backward pass. None, or no trainable entry at all, computes all gradients.
        """
        # A loss that depends on no parameter requiring a gradient cannot be differentiated.
        all_gradients = trainable is None or not bool(trainable.any())
        for parameter, positions in self._parameters:
            parameter.requires_grad_(all_gradients or bool(trainable[positions].any()))  # type: ignore[index]
        self.module.train()
        for part in self._modules_with_frozen_buffers:
            part.eval()

    @torch.no_grad()
    def to_vector(self) -> Tensor:
        """Copy parameters and float buffers into a vector ``(P,)`` on the CPU."""
        parts = [self.flat.detach().cpu()]
        parts += [self._buffers[s.name].cpu().reshape(-1) for s in self.layout.tensors if s.role == "buffer"]
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    def backward(self, loss: Tensor) -> None:
        """Set ``gradient`` to the gradient of ``loss``."""
        self.gradient.zero_()
        loss.backward()

    def to_device(self, batch: Any) -> Any:
        """Return the batch with its tensors on the model's device."""
        if isinstance(batch, Tensor):
            return batch.to(self.device)
        if isinstance(batch, dict):
            return {key: self.to_device(value) for key, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            return type(batch)(self.to_device(value) for value in batch)
        return batch
