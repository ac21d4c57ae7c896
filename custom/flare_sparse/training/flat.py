"""A network whose parameters and gradients are views of one vector each: masks and optimisers see a single tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..params import Layout


class FlatModel:
    """Binds a module to vectors of a layout.

    Attributes:
        module: the network; its parameters are views of ``flat``.
        flat: parameter ``(layout.trainable_size,)`` that an optimiser steps.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device | str = "cpu"):
        self.layout, self.device = layout, torch.device(device)
        self.module = module.to(self.device)
        self.flat = nn.Parameter(torch.zeros(layout.trainable_size, device=self.device))
        self.flat.grad = torch.zeros_like(self.flat)
        named = dict(self.module.named_parameters())
        self._buffers = dict(self.module.named_buffers())
        for entry, start in zip(layout.entries, layout.offsets, strict=False):
            if entry.role == "buffer":
                continue
            parameter = named[entry.name]
            parameter.data = self.flat.data[start : start + entry.size].view(entry.shape)
            parameter.grad = self.flat.grad[start : start + entry.size].view(entry.shape)

    @property
    def gradient(self) -> Tensor:
        """``(trainable_size,)``; ``backward`` adds to it."""
        assert self.flat.grad is not None
        return self.flat.grad

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        """Set parameters and float buffers from a vector ``(P,)``; integer buffers restart at zero."""
        self.flat.copy_(vector[: self.layout.trainable_size])
        for entry, start in zip(self.layout.entries, self.layout.offsets, strict=False):
            if entry.role == "buffer":
                self._buffers[entry.name].copy_(vector[start : start + entry.size].view(entry.shape))
        for buffer in self._buffers.values():
            if buffer is not None and not buffer.is_floating_point():
                buffer.zero_()

    @torch.no_grad()
    def vector(self) -> Tensor:
        """A copy ``(P,)`` on the CPU of parameters and float buffers."""
        parts = [self.flat.detach().cpu()]
        parts += [self._buffers[e.name].cpu().reshape(-1) for e in self.layout.entries if e.role == "buffer"]
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
