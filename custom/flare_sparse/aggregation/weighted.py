"""One sum for every method: float64, in site-name order, so that arrival order never shows (C6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum

import torch
from torch import Tensor

from ..exchange import Contribution
from ..mask import Mask

Weights = Callable[[Sequence[Contribution]], list[float]]
"""How much each update counts; gets the updates in site-name order."""


def weigh_by_examples(updates: Sequence[Contribution]) -> list[float]:
    """n_k over the sum of n_k of this round's participants."""
    total = sum(update.num_examples for update in updates)
    return [update.num_examples / total for update in updates]


def weigh_equally(updates: Sequence[Contribution]) -> list[float]:
    """1 / K."""
    return [1 / len(updates)] * len(updates)


def weigh_by_one(updates: Sequence[Contribution]) -> list[float]:
    """A plain sum."""
    return [1.0] * len(updates)


def compute_common_cap(numbers: Sequence[float], max_share: float) -> float:
    """What the largest of ``numbers`` are cut to, so that none is more than ``max_share`` (below 1) of the sum of all.

    The largest number that keeps the rule; the smallest of ``numbers`` where there are too few of them for it.

    >>> compute_common_cap([10, 960, 30], 0.5)
    40.0
    """
    ascending = sorted(numbers)
    for large in range(1, len(ascending) + 1):
        rest = fsum(ascending[:-large])  # not by subtraction: beside a huge number nothing would be left of a small one
        if large * max_share >= 1:
            break
        limit = max_share * rest / (1 - large * max_share)
        if large == len(ascending) or ascending[-large - 1] <= limit:
            return limit
    return ascending[0]


def cap(numbers: Sequence[float], max_share: float) -> list[float]:
    """The numbers, the largest cut so that none is more than ``max_share`` of the sum of all."""
    if max_share >= 1 or not numbers:
        return list(numbers)
    limit = compute_common_cap(numbers, max_share)
    return [min(number, limit) for number in numbers]


def normalize_capped(weights: Sequence[float], max_share: float) -> list[float]:
    """Weights over their sum, none above ``max_share``; all equal where too few are above 0 for that.

    >>> normalize_capped([1.0, 3.0, 96.0], 0.5)
    [0.125, 0.375, 0.5]
    """
    cut = cap(weights, max_share)
    if max_share < 1 and not any(cut):
        cut = [1.0] * len(cut)
    total = sum(cut)
    return [weight / total for weight in cut]


def weighted_sum(updates: Sequence[Contribution], weights: Weights) -> Tensor:
    """Sum over sites of ``weight * values``, each on its own selection; absent entries count as zero.

    Returns:
        float32 ``(P,)``, accumulated in float64 in site-name order.

    Raises:
        ValueError: there is no update, or two carry the same site name.
    """
    on, values = _sum(updates, weights, lambda update: update.patch.values.double())
    return values.float() if on.is_full else on.put(values, torch.zeros(on.size))


def apply_deltas(updates: Sequence[Contribution], weights: Weights, before: Tensor) -> Tensor:
    """``before`` plus the weighted sum of the updates' changes to it; absent entries have not changed.

    Args:
        updates: one per site, with new values.
        weights: how much each change counts; they need not add up to 1.
        before: ``(P,)`` what the updates started from.

    Returns:
        float32 ``(P,)``; differences and their sum are taken in float64, in site-name order.
    """
    on, change = _sum(updates, weights, lambda u: u.patch.values.double() - u.patch.mask.take(before).double())
    return on.put((on.take(before).double() + change).float(), before.clone())


def average_over_owners(updates: Sequence[Contribution], weights: Weights, fallback: Tensor) -> Tensor:
    """As :func:`weighted_sum`, divided per coordinate by the weight of those that hold it.

    Args:
        updates: one per site.
        weights: how much each counts.
        fallback: ``(P,)`` values where nobody holds a coordinate.
    """
    on, total = _sum(updates, weights, lambda update: update.patch.values.double())
    _, held = _sum(updates, weights, lambda update: torch.ones(update.patch.mask.count, dtype=torch.float64))
    somewhere = held > 0
    average = torch.where(somewhere, total / held.where(somewhere, torch.ones(())), on.take(fallback).double())
    return on.put(average, fallback.clone())


def _sum(
    updates: Sequence[Contribution], weights: Weights, values: Callable[[Contribution], Tensor]
) -> tuple[Mask, Tensor]:
    """The entries that may differ from zero and their sums, float64; on one support only live values are touched."""
    ordered = sorted(updates, key=lambda update: update.site)
    if not ordered or len({update.site for update in ordered}) != len(ordered):
        raise ValueError(f"need one update of each site, found {[update.site for update in ordered]}")
    shared = ordered[0].patch.mask
    same = all(update.patch.mask == shared for update in ordered)
    support = shared if same else Mask.full(shared.size)
    total = torch.zeros(support.count, dtype=torch.float64)
    for update, weight in zip(ordered, weights(ordered), strict=True):
        if same:
            total.add_(values(update), alpha=weight)
        else:
            total.index_add_(0, update.patch.mask.indices, values(update), alpha=weight)
    return support, total
