"""Robust aggregation: statistics per entry, over the sites that sent it, which a few bad sites cannot move far.

Rules over Euclidean distances (Krum, geometric median) are left out on purpose: sparse updates whose masks hardly
overlap are all far from each other, whether they are honest or not.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ...core.exchange import Contribution, Patch
from ...core.mask import floor_fraction
from ...core.needs import Need, Needs
from ...core.settings import Settings
from .weighted import weigh_by_examples, weighted_sum

# Entries processed at once: bounds the memory of the sorted float64 copies to a few MiB per site.
_CHUNK = 2**18


class AggregationRule(Settings):
    """How contributions become one model."""

    rule: Literal["mean", "median", "trimmed_mean"] = "mean"
    """mean: weighted by examples; median and trimmed_mean: per entry, each site counts once"""
    trim: float = Field(0.1, gt=0, lt=0.5)
    """share of the sites that trimmed_mean leaves out at each end"""
    min_owners: int = Field(3, ge=2)
    """fewest sites that must send an entry for it to change; not for mean"""

    @property
    def needs_single_updates(self) -> bool:
        """Whether the server must read each site's own values."""
        return self.rule != "mean"

    @property
    def min_sites_needed(self) -> int:
        """Fewest contributions with which the rule protects from one bad site."""
        if self.rule == "trimmed_mean":
            return max(self.min_owners, math.ceil(1 / self.trim))
        return self.min_owners if self.rule == "median" else 1

    def needs(self) -> Needs:
        """Return what the rule needs of the other parts of a run."""
        if not self.needs_single_updates:
            return frozenset()
        return frozenset(
            {
                Need.SINGLE_UPDATES.because(
                    f"aggregation.rule {self.rule} compares the sites' values", "set aggregation.rule to mean"
                ),
                Need.QUORUM.because(f"aggregation.rule {self.rule}", amount=self.min_sites_needed),
            }
        )


def aggregate(contributions: Sequence[Contribution], previous: Tensor, rule: AggregationRule) -> Tensor:
    """Return the new weights ``(P,)``.

    Args:
        contributions: one per site, of content ``weights``.
        previous: ``(P,)`` values of the entries that fewer than ``min_owners`` sites sent.
        rule: ``mean`` is :func:`~flare_sparse.methods.aggregation.weighted.weighted_sum`, bit for bit.
    """
    if rule.rule == "mean":
        return weighted_sum(contributions, weigh_by_examples)
    shared = contributions[0].patch.mask
    has_one_mask = all(contribution.patch.mask == shared for contribution in contributions)
    support = shared if has_one_mask else type(shared).full(shared.size)
    fallback = previous[support.indices]
    chunks = _iterate_chunks(contributions, support.indices, fallback, shared.size)
    results = [_aggregate_chunk(rows, chunk_fallback, rule) for rows, chunk_fallback in chunks]
    # Entries outside a common mask are pruned: they become zero, and do not keep the value that they had.
    return support.put(torch.cat(results) if results else fallback, previous.clone() * support.bits)


def _iterate_chunks(
    contributions: Sequence[Contribution], indices: Tensor, fallback: Tensor, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield values ``(sites, entries)``, NaN where a site did not send an entry, and the entries' fallback."""
    vectors = []
    for contribution in sorted(contributions, key=lambda contribution: contribution.site):
        vector = torch.full((size,), math.nan)
        vectors.append(contribution.patch.mask.put(contribution.patch.values, vector))
    for start in range(0, indices.numel(), _CHUNK):
        chunk = indices[start : start + _CHUNK]
        yield torch.stack([vector[chunk] for vector in vectors]), fallback[start : start + _CHUNK]


def _aggregate_chunk(rows: Tensor, fallback: Tensor, rule: AggregationRule) -> Tensor:
    """Return the median or the trimmed mean ``(entries,)`` of ``rows`` ``(sites, entries)``."""
    owners = (~rows.isnan()).sum(0)
    # NaN sorts last: the values of an entry's owners have the ranks 0 to owners - 1.
    ordered = rows.double().sort(dim=0).values.nan_to_num(0.0)
    # A median is a mean trimmed to the one or two middle values. The float32 product of a share and a tensor of counts
    # may fall below the integer that is meant, so the counts are looked up.
    counts = torch.tensor([floor_fraction(rule.trim, number) for number in range(rows.shape[0] + 1)])
    trimmed = (owners - 1) // 2 if rule.rule == "median" else counts[owners]
    rank = torch.arange(rows.shape[0]).unsqueeze(1)
    is_inner = (rank >= trimmed) & (rank < owners - trimmed)
    mean = (ordered * is_inner).sum(0) / is_inner.sum(0).clamp_min(1)
    # With few owners, one bad site would be a large part of the statistic.
    return torch.where(owners >= rule.min_owners, mean.float(), fallback)


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
