"""Weighted sums of contributions. All methods share them.

Sums are accumulated in float64, in site-name order: the order of arrival must not show in the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import fsum

import numpy as np
import torch
from torch import Tensor

from ...core.exchange import Contribution, Patch
from ...core.mask import Mask

Weights = Callable[[Sequence[Contribution]], list[float]]
"""Returns the weight of each contribution; receives them in site-name order."""


def weigh_by_examples(contributions: Sequence[Contribution]) -> list[float]:
    """Return n_k over the sum of n_k of the contributions."""
    total = sum(contribution.num_examples for contribution in contributions)
    return [contribution.num_examples / total for contribution in contributions]


def weigh_equally(contributions: Sequence[Contribution]) -> list[float]:
    """Return 1 / K for each of K contributions."""
    return [1 / len(contributions)] * len(contributions)


def weigh_by_one(contributions: Sequence[Contribution]) -> list[float]:
    """Return 1 for each contribution: a sum and not a mean."""
    return [1.0] * len(contributions)


def compute_common_cap(numbers: Sequence[float], max_share: float) -> float:
    """Return the largest cap for which no capped number exceeds ``max_share`` (below 1) of the sum of all.

    With too few numbers for such a cap, return the smallest one: all weigh the same then.

    >>> compute_common_cap([10, 960, 30], 0.5)
    40.0
    """
    ascending = sorted(numbers)
    for large in range(1, len(ascending) + 1):
        # Summed, not subtracted from the total: small numbers would be lost in the rounding error of a huge one.
        remaining_sum = fsum(ascending[:-large])
        # The ``large`` largest numbers alone would fill the sum: no cap is low enough.
        if large * max_share >= 1:
            break
        # The cap c of the ``large`` largest numbers solves c = max_share * (rest + large * c).
        limit = max_share * remaining_sum / (1 - large * max_share)
        if large == len(ascending) or ascending[-large - 1] <= limit:
            return limit
    return ascending[0]


def cap(numbers: Sequence[float], max_share: float) -> list[float]:
    """Return the numbers, the largest ones lowered until none exceeds ``max_share`` of the sum of all."""
    if max_share >= 1 or not numbers:
        return list(numbers)
    limit = compute_common_cap(numbers, max_share)
    return [min(number, limit) for number in numbers]


def normalize_capped(weights: Sequence[float], max_share: float) -> list[float]:
    """Return the weights over their sum, none above ``max_share``; equal weights if too few are above 0 for that.

    >>> normalize_capped([1.0, 3.0, 96.0], 0.5)
    [0.125, 0.375, 0.5]
    """
    capped = cap(weights, max_share)
    # A single positive weight is capped to the zero of the others.
    if max_share < 1 and not any(capped):
        capped = [1.0] * len(capped)
    total = sum(capped)
    return [weight / total for weight in capped]


def clip_deltas(
    contributions: Sequence[Contribution], previous: Tensor, limit: float | None
) -> tuple[list[Contribution], dict[str, float]]:
    """Clip each site's delta to an L2 norm.

    Args:
        contributions: the delta of weights is measured from ``previous``; contents other than weights and deltas stay.
        previous: ``(P,)`` the weights that the sites started from.
        limit: largest L2 norm; None: no bound.

    Returns:
        The contributions, and by site the norm that each clipped delta had.
    """
    if limit is None:
        return list(contributions), {}
    clipped, norms = [], {}
    for contribution in contributions:
        patch = contribution.patch
        if contribution.content not in ("weights", "delta"):
            clipped.append(contribution)
            continue
        start = patch.mask.take(previous) if contribution.content == "weights" else torch.zeros(())
        delta = patch.values - start
        # float64: the square of a float32 above 1.8e19 overflows, and an infinite norm would clip the delta to zero.
        norm = float(delta.double().square().sum().sqrt())
        if norm > limit:
            norms[contribution.site] = norm
            clipped.append(replace(contribution, patch=Patch(start + delta * (limit / norm), patch.mask)))
        else:
            clipped.append(contribution)
    return clipped, norms


def weighted_sum(contributions: Sequence[Contribution], weights: Weights) -> Tensor:
    """Return the sum over sites of ``weight * values``; entries outside a site's mask count as zero.

    Args:
        contributions: one per site.
        weights: weight of each contribution.

    Returns:
        float32 ``(P,)``, accumulated in float64, in site-name order.

    Raises:
        ValueError: there is no contribution, or two are of one site.
    """
    mask, values = _compute_sum(contributions, weights, lambda contribution: contribution.patch.values)
    if mask.is_full:
        return values.float()
    # torch writes every zero; numpy takes memory that the system clears, in large pages, where it is first written.
    return mask.put(values, torch.from_numpy(np.zeros(mask.size, np.float32)))


def apply_deltas(contributions: Sequence[Contribution], weights: Weights, previous: Tensor) -> Tensor:
    """Return ``previous`` plus the weighted sum of the sites' deltas; entries outside a site's mask have a zero delta.

    Args:
        contributions: one per site, with trained weights.
        weights: weight of each delta; their sum need not be 1.
        previous: ``(P,)`` the weights that the sites started from.

    Returns:
        float32 ``(P,)``; deltas and their sum are computed in float64, in site-name order.
    """
    mask, delta = sum_deltas(contributions, weights, previous)
    return mask.put((mask.take(previous).double() + delta).float(), previous.clone())


def sum_deltas(contributions: Sequence[Contribution], weights: Weights, previous: Tensor) -> tuple[Mask, Tensor]:
    """Return the entries whose delta may differ from zero, and the weighted sum of the sites' deltas there, float64.

    Args:
        contributions: one per site, with trained weights.
        weights: weight of each delta; their sum need not be 1.
        previous: ``(P,)`` the weights that the sites started from.
    """
    # In float64 the delta of two float32 numbers is nearly always exact; in float32 small deltas would lose digits.
    return _compute_sum(
        contributions, weights, lambda c: c.patch.values.double() - c.patch.mask.take(previous).double()
    )


def average_over_owners(contributions: Sequence[Contribution], weights: Weights, fallback: Tensor) -> Tensor:
    """Return the weighted mean per entry, over the sites whose mask has the entry.

    Args:
        contributions: one per site.
        weights: weight of each contribution.
        fallback: ``(P,)`` values of the entries that no site sent.
    """
    mask, total = _compute_sum(contributions, weights, lambda contribution: contribution.patch.values)
    _, weight = _compute_sum(contributions, weights, lambda c: torch.ones(c.patch.mask.count))
    # A site of weight 0 owns entries without adding to their weight: these keep the fallback, too.
    is_owned = weight > 0
    average = torch.where(is_owned, total / weight.where(is_owned, torch.ones(())), mask.take(fallback).double())
    return mask.put(average, fallback.clone())


def _compute_sum(
    contributions: Sequence[Contribution], weights: Weights, values: Callable[[Contribution], Tensor]
) -> tuple[Mask, Tensor]:
    """Return the entries that may differ from zero, and their sums in float64.

    Args:
        contributions: one per site; each is read once and in turn, so that those in files need no memory together.
        weights: weight of each contribution.
        values: returns the values of a contribution.
    """
    # Addition of floats is not associative. Sorted by site, the sum has the same bits for every order of arrival.
    ordered = sorted(contributions, key=lambda contribution: contribution.site)
    if not ordered or len({contribution.site for contribution in ordered}) != len(ordered):
        raise ValueError(f"need one update of each site, found {[contribution.site for contribution in ordered]}")
    shared = ordered[0].patch.mask
    has_one_mask = all(contribution.patch.mask == shared for contribution in ordered)
    # With one common mask only its entries are touched: the cost follows the density, not the size of the model.
    support = shared if has_one_mask else Mask.full(shared.size)
    total = torch.zeros(support.count, dtype=torch.float64)
    for contribution, weight in zip(ordered, weights(ordered), strict=True):
        addends = values(contribution).double()
        if has_one_mask:
            total.add_(addends, alpha=weight)
        else:
            total.index_add_(0, contribution.patch.mask.indices, addends, alpha=weight)
    return support, total
