"""Erdos-Renyi-Kernel densities per tensor (Evci et al. 2020; DisPFL's initial masks)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mask import Mask, floor_fraction, top_k
from ..params import Layout


def compute_erk_densities(layout: Layout, pool: Mask, density: float) -> dict[str, float]:
    """Density per tensor name so that the whole pool has ``density``: proportional to ``sum(shape) / prod(shape)``.

    Tensors that would exceed 1 become dense and the rest is solved again.
    """
    named = layout.unflatten(pool.bits)
    sizes = {entry.name: entry.size for entry in layout.tensors if entry.size and bool(named[entry.name].any())}
    raw = {e.name: (sum(e.shape) / e.size if e.shape else 1.0) for e in layout.tensors if e.name in sizes}
    dense: set[str] = set()
    while True:
        free = [name for name in sizes if name not in dense]
        budget = density * sum(sizes.values()) - sum(sizes[name] for name in dense)
        scale = budget / sum(raw[name] * sizes[name] for name in free) if free else 0.0
        over = {name for name in free if scale * raw[name] > 1}
        if not over:
            return {name: 1.0 if name in dense else max(scale * raw[name], 0.0) for name in sizes}
        dense |= over


def draw_random_mask(layout: Layout, pool: Mask, densities: dict[str, float], make_generator: torch.Generator) -> Mask:
    """A random mask within ``pool`` with ``floor(density * size)`` live entries in each tensor."""
    noise: Tensor = torch.rand(layout.size, generator=make_generator)
    mask = Mask.empty(layout.size)
    for entry in layout.tensors:
        if entry.name in densities:
            candidates = Mask.from_tensors(layout, lambda e, wanted=entry: e is wanted) & pool  # type: ignore[misc]
            mask = mask | top_k(noise, floor_fraction(densities[entry.name], candidates.count), candidates)
    return mask
