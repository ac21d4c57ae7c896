"""Operations on several masks, drop and regrow, and weights whose tensor is zero in the initial model."""

import math
import operator
from collections.abc import Iterable
from functools import partial, reduce

from torch import Tensor

from ...core.mask import Mask, top_k
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


def find_zero_weights(layout: Layout, weights: Tensor, preset: str) -> tuple[str, ...]:
    """Return the names of the maskable weights of ``preset`` whose tensors are zero in ``weights`` ``(P,)``."""
    tensors = layout.unflatten(weights)
    maskable = (spec for spec in layout.tensors if spec.role in MASKABLE[preset])
    # A bias at zero blocks no gradient: it is pruned as the papers do.
    return tuple(s.name for s in maskable if s.role in ("weight", "other") and not tensors[s.name].any())
