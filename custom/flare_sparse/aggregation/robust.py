"""Sums that a few bad sites cannot move far: per coordinate, over the sites that sent it.

Euclidean rules (Krum, geometric median) are left out on purpose: on sparse answers whose supports hardly overlap, all
answers are far from each other. Per coordinate, over its owners, a statistic means what it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..exchange import Contribution, Patch
from .weighted import weigh_by_examples, weighted_sum

_CHUNK = 2**18


class AggregationRule(BaseModel):
    """How answers become one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: Literal["mean", "median", "trimmed_mean"] = Field(
        "mean",
        description="mean: weighted by examples; median and trimmed_mean: per coordinate, every site counts once",
    )
    trim: float = Field(0.1, gt=0, lt=0.5, description="share of the sites that trimmed_mean leaves out at each end")
    min_owners: int = Field(
        3, ge=2, description="fewest sites that must have sent a coordinate for it to change; not for mean"
    )

    @property
    def needs_single_updates(self) -> bool:
        """Whether the server must be able to read each site's own values."""
        return self.rule != "mean"

    @property
    def min_sites_needed(self) -> int:
        """Answers without which the rule protects from nobody."""
        if self.rule == "trimmed_mean":
            return max(self.min_owners, math.ceil(1 / self.trim))
        return self.min_owners if self.rule == "median" else 1


def aggregate(updates: Sequence[Contribution], before: Tensor, rule: AggregationRule) -> Tensor:
    """The new weights ``(P,)`` from the sites' weights.

    Args:
        updates: one per site, of content ``weights``.
        before: ``(P,)`` what a coordinate stays when too few sites own it.
        rule: ``mean`` is :func:`~flare_sparse.aggregation.weighted.weighted_sum`, bit for bit.
    """
    if rule.rule == "mean":
        return weighted_sum(updates, weigh_by_examples)
    shared = updates[0].patch.mask
    support = shared if all(u.patch.mask == shared for u in updates) else type(shared).full(shared.size)
    held = before[support.indices]
    pieces = [_robust(rows, kept, rule) for rows, kept in _chunks(updates, support.indices, held, shared.size)]
    return support.put(torch.cat(pieces) if pieces else held, before.clone() * support.bits)


def _chunks(
    updates: Sequence[Contribution], places: Tensor, held: Tensor, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Values ``(sites, coordinates)``, NaN where a site does not own one, some coordinates at a time."""
    ordered = sorted(updates, key=lambda update: update.site)
    vectors = []
    for update in ordered:
        vector = torch.full((size,), math.nan)
        vectors.append(update.patch.mask.put(update.patch.values, vector))
    for start in range(0, places.numel(), _CHUNK):
        here = places[start : start + _CHUNK]
        yield torch.stack([vector[here] for vector in vectors]), held[start : start + _CHUNK]


def _robust(rows: Tensor, kept: Tensor, rule: AggregationRule) -> Tensor:
    """``(coordinates,)``; NaN sorts last, so the owners' values stand first."""
    owners = (~rows.isnan()).sum(0)
    ordered = rows.double().sort(dim=0).values.nan_to_num(0.0)
    trimmed = (owners - 1) // 2 if rule.rule == "median" else (rule.trim * owners + 1e-9).floor().long()
    rank = torch.arange(rows.shape[0]).unsqueeze(1)
    inner = (rank >= trimmed) & (rank < owners - trimmed)
    middle = (ordered * inner).sum(0) / inner.sum(0).clamp_min(1)
    return torch.where(owners >= rule.min_owners, middle.float(), kept)


def clip_deltas(
    updates: Sequence[Contribution], before: Tensor, limit: float | None
) -> tuple[list[Contribution], dict[str, float]]:
    """No change is longer than ``limit`` (L2); returns the updates and the length that those shortened came with.

    Args:
        updates: weights are measured against ``before`` ``(P,)``, differences as they are; other contents are left.
        before: what the sites started from.
        limit: None: nothing is shortened.
    """
    if limit is None:
        return list(updates), {}
    kept, cut = [], {}
    for update in updates:
        if update.content not in ("weights", "delta"):
            kept.append(update)
            continue
        start = update.patch.mask.take(before) if update.content == "weights" else torch.zeros(())
        change = update.patch.values - start
        length = float(change.double().square().sum().sqrt())
        if length > limit:
            cut[update.site] = length
            update = replace(update, patch=Patch(start + change * (limit / length), update.patch.mask))  # noqa: PLW2901
        kept.append(update)
    return kept, cut
