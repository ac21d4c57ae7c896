"""Rejection of updates that are far larger than the others of their round."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from ..exchange import Contribution
from .replies import AttemptResult

FEWEST = 3
"""With fewer updates than this, the median does not tell which of them is the outlier."""


def reject_outliers(
    result: AttemptResult, get_previous: Callable[[], Tensor], max_ratio: float | None
) -> AttemptResult:
    """Reject the updates with a delta longer than ``max_ratio`` times the median of the round's deltas.

    Args:
        result: replies of an attempt.
        get_previous: returns the model ``(P,)`` that the sites started from; called only if an update holds weights.
        max_ratio: largest ratio; None: no bound.

    Returns:
        The replies; an outlier is rejected with ``E_NORM``. Values are never changed: the other updates keep their
        bits. Encrypted updates and scores are not examined.
    """
    examined = [c for c in result.contributed if c.content in ("weights", "delta") and c.patch.encrypted is None]
    if max_ratio is None or len(examined) < FEWEST:
        return result
    previous = get_previous() if any(c.content == "weights" for c in examined) else Tensor()
    norms = {contribution.site: _compute_norm(contribution, previous) for contribution in examined}
    typical = median(norms.values())
    # A median of zero: most sites sent nothing, and any update is infinitely longer.
    if not typical:
        return result
    # "not <=" and not ">", which NaN, the norm of inf - inf, would pass.
    for site in sorted(site for site, norm in norms.items() if not norm <= max_ratio * typical):
        result = result.reject(site, "E_NORM")
    return result


def _compute_norm(contribution: Contribution, previous: Tensor) -> float:
    """Return the L2 norm of a contribution's delta, infinite if it overflows float32."""
    patch = contribution.patch
    delta = patch.values - patch.mask.take(previous) if contribution.content == "weights" else patch.values
    return float(torch.linalg.vector_norm(delta))
