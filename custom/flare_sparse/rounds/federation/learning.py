"""From a round's contributions to the next state of the method; updates far larger than the others are rejected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...core.errors import UndefinedScores
from ...core.exchange import Contribution, Patch
from ...methods.aggregation.weighted import clip_deltas
from ...methods.method import Method
from ...wire.formats import FORMATS, ValueType
from .roster import AttemptResult
from .rules import RoundRules, cap_contributions

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
        bits. Summed updates and scores are not examined.
    """
    # Values that are summed unread are NaN at the server.
    contributed = [] if result.total is not None else result.contributed
    examined = [contribution for contribution in contributed if contribution.content in ("weights", "delta")]
    if max_ratio is None or len(examined) < FEWEST:
        return result
    get_model = cache(get_previous)
    # Sites that choose their own entries share one vector of the model.
    get_vector = cache(lambda: get_model().to_vector())
    norms = {contribution.site: _compute_norm(contribution, get_model, get_vector) for contribution in examined}
    typical = median(norms.values())
    # A median of zero: most sites sent nothing, and any update is infinitely longer.
    if not typical:
        return result
    # "not <=" and not ">", which NaN, the norm of inf - inf, would pass.
    for site in sorted(site for site, norm in norms.items() if not norm <= max_ratio * typical):
        result = result.reject(site, "E_NORM")
    return result


def _compute_norm(
    contribution: Contribution, get_model: Callable[[], Patch], get_vector: Callable[[], Tensor]
) -> float:
    """Return the L2 norm of a contribution's delta, infinite if it overflows float32.

    Args:
        contribution: weights or a delta.
        get_model: returns the model that the site started from; called only for weights.
        get_vector: returns the vector ``(P,)`` of that model; called only for weights with a mask of their own.
    """
    values, mask = contribution.patch.values, contribution.patch.mask
    if contribution.content == "weights":
        model = get_model()
        # With the model's own mask, as in most methods, the cost follows the number of live entries.
        values = values - (model.values if mask == model.mask else mask.take(get_vector()))
    return float(torch.linalg.vector_norm(values))


HasQuorum = Callable[[Sequence[Contribution]], bool]
"""Whether a round may be committed with these contributions."""


@dataclass(frozen=True)
class LearnResult:
    """Result of learning from a round.

    Attributes:
        state: the method's state after the round.
        contributions: the aggregated contributions, after capping and clipping.
        capped: weight of each site that counts with fewer examples than it reported.
        clipped: L2 norm of a site's delta before it was clipped.
    """

    state: Any
    contributions: list[Contribution]
    capped: dict[str, int] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)


def learn_from(
    result: AttemptResult,
    state: Any,
    method: Method[Any, Any],
    values: ValueType,
    rules: RoundRules,
    has_quorum: HasQuorum,
) -> tuple[AttemptResult, LearnResult | None]:
    """Compute the next state; until it can be sent, reject the contribution with the largest norm.

    Args:
        result: replies of the attempt.
        state: the method's state before the round.
        method: computes the next state.
        values: number format of messages, which the next model must fit.
        rules: limits of a site's weight and delta.
        has_quorum: whether given contributions meet the quorum.

    Returns:
        The replies, with rejected contributions moved; and what was learned, None below the quorum.
    """
    # With clip_norm, a longer delta is clipped instead and counts.
    if rules.clip_norm is None:
        result = reject_outliers(result, lambda: method.model(state), rules.max_norm_ratio)
    # Each contribution is finite, but their sum or a factorization may not be. A model that cannot be encoded would
    # stop the run in the next round, so this is checked before the commit, and the likeliest cause is rejected.
    while has_quorum(result.contributed):
        contributions, capped = cap_contributions(result.contributed, rules.max_share)
        # Only clipping needs the model as a vector of P floats.
        previous = Tensor() if rules.clip_norm is None else method.model(state).to_vector()
        contributions, clipped = clip_deltas(contributions, previous, rules.clip_norm)
        learned = contributions if result.total is None else [result.total]
        next_state = _compute_state(method, values, state, learned)
        if next_state is not None:
            return result, LearnResult(next_state, contributions, capped, clipped)
        # Of a sum, no single contribution can be rejected: the attempt has failed.
        if result.total is not None:
            return result, None
        # float64, since the square of a large float32 overflows.
        largest = max(result.contributed, key=lambda c: float(torch.linalg.vector_norm(c.patch.values.double())))
        result = result.reject(largest.site, "E_RANGE")
    return result, None


def _compute_state(method: Method[Any, Any], values: ValueType, state: Any, contributions: list[Contribution]) -> Any:
    """Return the state after a round, or None if the contributions' values do not let it be computed or sent.

    Raises:
        SelectionError: the settings cannot be met, whatever the sites send; rejecting a site would not help.
    """
    try:
        next_state = method.learn(state, contributions)
    # Values near the largest float32 can break a decomposition or a selection, which counts as a state with infinities.
    except (ArithmeticError, UndefinedScores, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None
    return next_state if FORMATS[values].can_hold(method.model(next_state).values) else None
