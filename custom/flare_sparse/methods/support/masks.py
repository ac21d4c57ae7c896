"""Unions and random masks, drop and regrow, and weights whose tensor is zero in the initial model.

Random masks have given densities per tensor, such as Erdos-Renyi-Kernel (RigL, Evci et al. 2020; DisPFL).
"""

import math
import operator
from collections.abc import Iterable
from functools import partial, reduce

import torch
from torch import Tensor

from ...core.mask import Mask, floor_fraction, top_k
from ...core.params import MASKABLE, Layout


def unite_masks(masks: Iterable[Mask]) -> Mask:
    """Return the entries that at least one mask has; there is at least one mask."""
    return reduce(Mask.__or__, masks)


def drop_and_regrow(
    layout: Layout, live: Mask, maskable: Mask, weights: Tensor, growth: Tensor, fraction: float
) -> Mask:
    """Move live entries: in each tensor drop those of the smallest weights and regrow as many of the largest growth.

    The number of live entries of every tensor stays the same. An entry that has just been dropped may regrow.

    Args:
        layout: layout of the network.
        live: live entries; those outside ``maskable`` stay live.
        maskable: entries that may be dropped or regrown.
        weights: ``(P,)``.
        growth: ``(P,)`` scores of the entries that are off.
        fraction: share of a tensor's live entries that moves, rounded up.
    """
    evolved = live & maskable
    for tensor in layout.tensors:
        candidates = Mask.from_tensors(layout, partial(operator.is_, tensor)) & maskable
        current = evolved & candidates
        moving = min(math.ceil(fraction * current.count), candidates.count - current.count)
        if moving > 0:
            kept = current - top_k(-weights.abs(), moving, current)
            evolved = (evolved - current) | kept | top_k(growth, moving, candidates - kept)
    return evolved | (live - maskable)


def find_zero_weights(layout: Layout, weights: Tensor, preset: str) -> Mask:
    """Return the entries of the maskable weights of ``preset`` whose tensors are zero in ``weights`` ``(P,)``."""
    tensors = layout.unflatten(weights)
    # A bias at zero blocks no gradient: it is pruned as the papers do.
    roles = {"weight", "other"}.intersection(MASKABLE[preset])
    return Mask.from_tensors(layout, lambda spec: spec.role in roles and not bool(tensors[spec.name].any()))


def compute_erk_densities(layout: Layout, pool: Mask, density: float) -> dict[str, float]:
    """Return the density of each tensor, by name, such that the pool as a whole has ``density``.

    Densities are proportional to ``sum(shape) / prod(shape)``.

    Args:
        layout: layout of the model.
        pool: entries to distribute over; tensors without an entry in it are not listed.
        density: share of live entries of the pool, 0 to 1.
    """
    bits_by_tensor = layout.unflatten(pool.bits)
    sizes = {spec.name: spec.size for spec in layout.tensors if spec.size and bool(bits_by_tensor[spec.name].any())}
    raw = {s.name: (sum(s.shape) / s.size if s.shape else 1.0) for s in layout.tensors if s.name in sizes}
    dense: set[str] = set()
    # A density cannot exceed 1: such tensors become dense, and the scale of the others is solved again for the rest of
    # the budget. At least one tensor becomes dense in each pass, so the loop ends.
    while True:
        free = [name for name in sizes if name not in dense]
        budget = density * sum(sizes.values()) - sum(sizes[name] for name in dense)
        scale = budget / sum(raw[name] * sizes[name] for name in free) if free else 0.0
        saturated = {name for name in free if scale * raw[name] > 1}
        if not saturated:
            return {name: 1.0 if name in dense else max(scale * raw[name], 0.0) for name in sizes}
        dense |= saturated


def draw_random_mask(layout: Layout, pool: Mask, densities: dict[str, float], generator: torch.Generator) -> Mask:
    """Draw a random mask nested in ``pool`` with ``floor(density * size)`` live entries of each tensor."""
    candidates = layout.unflatten(pool.bits)
    counts = {name: floor_fraction(density, int(candidates[name].sum())) for name, density in densities.items()}
    return _draw_entries(layout, pool, counts, generator)


def shuffle_mask(layout: Layout, pool: Mask, mask: Mask, generator: torch.Generator) -> Mask:
    """Draw a random mask nested in ``pool`` with as many live entries of each tensor as ``mask`` has there.

    It separates the densities of the layers from the choice within them: Frankle et al. 2021, "Pruning Neural Networks
    at Initialization: Why Are We Missing the Mark?", section 5.
    """
    counts = {name: int(bits.sum()) for name, bits in layout.unflatten((mask & pool).bits).items()}
    return _draw_entries(layout, pool, counts, generator)


def _draw_entries(layout: Layout, pool: Mask, counts: dict[str, int], generator: torch.Generator) -> Mask:
    """Draw a number of entries of each tensor, by name, from the pool."""
    noise: Tensor = torch.rand(layout.size, generator=generator)
    mask = Mask.empty(layout.size)
    for spec in layout.tensors:
        if counts.get(spec.name):
            candidates = Mask.from_tensors(layout, lambda s, spec=spec: s is spec) & pool  # type: ignore[misc]
            mask = mask | top_k(noise, counts[spec.name], candidates)
    return mask
