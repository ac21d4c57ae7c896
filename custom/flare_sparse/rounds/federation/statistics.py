"""The exchange before all rounds in which sites send statistics of their inputs, which the first model holds pooled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.exchange import STATISTICS, Assignment, Patch, Request, UpdateSpec
from ...core.params import Layout
from ...inputs.scaling import build_statistics_mask, select_statistics
from .learning import HasQuorum, LearnResult
from .replies import AttemptResult


def build_assignments(layout: Layout, sites: Sequence[str]) -> dict[str, Assignment]:
    """Return the request for statistics, the same for every site; it carries no model."""
    mask = build_statistics_mask(layout)
    request = Request(STATISTICS, 0, Patch.empty(layout.size), mask)
    return dict.fromkeys(sites, Assignment(request, UpdateSpec(STATISTICS, mask)))


def learn_statistics(
    layout: Layout, build_state: Callable[[Tensor], Any], result: AttemptResult, has_quorum: HasQuorum
) -> tuple[AttemptResult, LearnResult | None]:
    """Return the method's state with the pooled statistics; a contribution that cannot be statistics is rejected.

    Args:
        layout: layout of the model.
        build_state: returns the state before round 1 from the values of the statistics, in the order of the layout.
        result: replies of the attempt.
        has_quorum: whether given contributions meet the quorum.
    """
    # A wrong count would move the scale of every site, and no later rule looks at it.
    for contribution in result.contributed:
        parts = select_statistics(contribution.patch.to_vector(), layout)
        if not all(layer.is_valid(part, contribution.num_examples) for layer, part in parts):
            result = result.reject(contribution.site, "E_RANGE")
    contributions = result.contributed
    if not has_quorum(contributions):
        return result, None
    # In site-name order, so that the sums have the same bits in every environment.
    by_site = [select_statistics(contribution.patch.to_vector(), layout) for contribution in contributions]
    pooled = [parts[0][0].pool_statistics([part for _, part in parts]) for parts in zip(*by_site, strict=True)]
    values = torch.cat([part.flatten() for part in pooled])
    return result, LearnResult(build_state(values), contributions)
