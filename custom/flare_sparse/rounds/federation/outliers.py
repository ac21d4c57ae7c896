"""Rejection of updates that are far larger than the others of their round."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from ...core.exchange import Contribution, Patch
from ...core.mask import Mask
from .replies import AttemptResult

FEWEST = 3
"""With fewer updates than this, the median does not tell which of them is the outlier."""


def reject_outliers(result: AttemptResult, get_previous: Callable[[], Patch], max_ratio: float | None) -> AttemptResult:
    """Reject the updates with a delta longer than ``max_ratio`` times the median of the round's deltas.

    Args:
        result: replies of an attempt.
        get_previous: returns the model that the sites started from; called only if an update holds weights.
        max_ratio: largest ratio; None: no bound.

    Returns:
        The replies; an outlier is rejected with ``E_NORM``. Values are never changed: the other updates keep their
        bits. Encrypted and summed updates and scores are not examined.
    """
    # Values that are summed unread are NaN at the server.
    if result.total is not None:
        return result
    examined = [c for c in result.contributed if c.content in ("weights", "delta") and c.patch.encrypted is None]
    if max_ratio is None or len(examined) < FEWEST:
        return result
    previous = _Previous(get_previous()) if any(c.content == "weights" for c in examined) else None
    norms = {contribution.site: _compute_norm(contribution, previous) for contribution in examined}
    typical = median(norms.values())
    # A median of zero: most sites sent nothing, and any update is infinitely longer.
    if not typical:
        return result
    # "not <=" and not ">", which NaN, the norm of inf - inf, would pass.
    for site in sorted(site for site, norm in norms.items() if not norm <= max_ratio * typical):
        result = result.reject(site, "E_NORM")
    return result


class _Previous:
    """Values of a model, by mask.

    Args:
        model: the model.
    """

    def __init__(self, model: Patch):
        self._model = model

    @cached_property
    def _vector(self) -> Tensor:
        return self._model.to_vector()

    def take(self, mask: Mask) -> Tensor:
        """Return the values ``(mask.count,)`` of the entries of a mask; those outside the model are zero."""
        # With the model's own mask, as in most methods, the cost follows the number of live entries.
        return self._model.values if mask == self._model.mask else mask.take(self._vector)


def _compute_norm(contribution: Contribution, previous: _Previous | None) -> float:
    """Return the L2 norm of a contribution's delta, infinite if it overflows float32."""
    patch = contribution.patch
    delta = patch.values
    if contribution.content == "weights" and previous is not None:
        delta = delta - previous.take(patch.mask)
    return float(torch.linalg.vector_norm(delta))
