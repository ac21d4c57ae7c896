"""A network whose parameters and gradients are views of one vector each: masks and optimisers see a single tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..params import Layout, get_frozen_tensors


class FlatModel:
    """Binds a module to vectors of a layout.

    Attributes:
        module: the network; its parameters are views of ``flat``.
        flat: parameter ``(layout.trainable_size,)`` that an optimiser steps.

    Parameters and buffers that are not of the layout, a frozen base, stay as they are.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device | str = "cpu"):
        self.layout, self.device = layout, torch.device(device)
        self.module = module.to(self.device)
        self.flat = nn.Parameter(torch.zeros(layout.trainable_size, device=self.device))
        self.flat.grad = torch.zeros_like(self.flat)
        named = dict(self.module.named_parameters())
        self._parameters: list[tuple[nn.Parameter, slice]] = []
        self._buffers = dict(self.module.named_buffers())
        self._counts = {n: b.clone() for n, b in self._buffers.items() if b is not None and not b.is_floating_point()}
        base = get_frozen_tensors(self.module)
        self._still = [
            part
            for prefix, part in self.module.named_modules()
            if any(name in base for name, _ in part.named_buffers(prefix, recurse=False))
        ]
        for entry, start in zip(layout.tensors, layout.offsets, strict=False):
            if entry.role == "buffer":
                continue
            parameter, place = named[entry.name], slice(start, start + entry.size)
            parameter.data = self.flat.data[place].view(entry.shape)
            parameter.grad = self.flat.grad[place].view(entry.shape)
            self._parameters.append((parameter, place))

    @property
    def gradient(self) -> Tensor:
        """``(trainable_size,)``; ``backward`` adds to it."""
        assert self.flat.grad is not None
        return self.flat.grad

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        """Set parameters and float buffers from a vector ``(P,)``; integer buffers restart as they were made."""
        self.flat.copy_(vector[: self.layout.trainable_size])
        for entry, start in zip(self.layout.tensors, self.layout.offsets, strict=False):
            if entry.role == "buffer":
                self._buffers[entry.name].copy_(vector[start : start + entry.size].view(entry.shape))
        for name, initial in self._counts.items():
            self._buffers[name].copy_(initial)

    def set_training_mode(self, free: Tensor | None = None) -> None:
        """The module in training mode; what holds frozen statistics stays in evaluation mode, so they do not drift.

        Args:
            free: bool ``(trainable_size,)``: no gradient is computed for a tensor without an entry in it, which saves
                its share of the work; None, or no entry at all: all gradients are.
        """
        every = free is None or not bool(free.any())
        for parameter, place in self._parameters:
            parameter.requires_grad_(every or bool(free[place].any()))  # type: ignore[index]
        self.module.train()
        for part in self._still:
            part.eval()

    @torch.no_grad()
    def to_vector(self) -> Tensor:
        """A copy ``(P,)`` on the CPU of parameters and float buffers."""
        parts = [self.flat.detach().cpu()]
        parts += [self._buffers[e.name].cpu().reshape(-1) for e in self.layout.tensors if e.role == "buffer"]
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    def backward(self, loss: Tensor) -> None:
        """Set ``gradient`` to that of ``loss``."""
        self.gradient.zero_()
        loss.backward()

    def to_device(self, batch: Any) -> Any:
        """The batch with its tensors where the model is."""
        if isinstance(batch, Tensor):
            return batch.to(self.device)
        if isinstance(batch, dict):
            return {key: self.to_device(value) for key, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            return type(batch)(self.to_device(value) for value in batch)
        return batch
