"""From a round's contributions to the next state of the method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.errors import UndefinedScores
from ...core.exchange import Contribution
from ...methods.aggregation.robust import clip_deltas
from ...methods.method import Method
from ..endpoints.server import ServerEndpoint
from .outliers import reject_outliers
from .replies import AttemptResult
from .rules import RoundRules, cap_contributions

HasQuorum = Callable[[Sequence[Contribution]], bool]
"""Whether a round may be committed with these contributions."""


@dataclass(frozen=True)
class LearnResult:
    """Result of learning from a round.

    Attributes:
        state: the method's state after the round.
        contributions: the aggregated contributions, after capping and clipping.
        capped: weight of each site that counts with fewer examples than it reported; 0: it does not count.
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
    endpoint: ServerEndpoint,
    rules: RoundRules,
    has_quorum: HasQuorum,
) -> tuple[AttemptResult, LearnResult | None]:
    """Compute the next state; until it can be sent, reject the contribution with the largest norm.

    Args:
        result: replies of the attempt.
        state: the method's state before the round.
        method: computes the next state.
        endpoint: checks which values can be sent.
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
        contributions, capped = _cap_weights(result.contributed, endpoint, rules)
        # Only clipping needs the model as a vector of P floats.
        previous = Tensor() if rules.clip_norm is None else method.model(state).to_vector()
        contributions, clipped = clip_deltas(contributions, previous, rules.clip_norm)
        learned = contributions if result.total is None else [result.total]
        next_state = _compute_state(method, endpoint, state, learned)
        if next_state is not None:
            return result, LearnResult(next_state, contributions, capped, clipped)
        # Of a sum, no single contribution can be rejected: the attempt has failed.
        if result.total is not None:
            return result, None
        # float64, since the square of a large float32 overflows.
        largest = max(result.contributed, key=lambda c: float(torch.linalg.vector_norm(c.patch.values.double())))
        result = result.reject(largest.site, "E_RANGE")
    return result, None


def _cap_weights(
    contributions: list[Contribution], endpoint: ServerEndpoint, rules: RoundRules
) -> tuple[list[Contribution], dict[str, int]]:
    """Return the contributions with capped weights, and the weight of each one that counts less than reported."""
    capped, examples = cap_contributions(contributions, rules.max_share)
    underweight = endpoint.protection.find_underweight_sites(capped)
    counted_contributions = [contribution for contribution in capped if contribution.site not in underweight]
    return counted_contributions, {**examples, **dict.fromkeys(underweight, 0)}


def _compute_state(
    method: Method[Any, Any], endpoint: ServerEndpoint, state: Any, contributions: list[Contribution]
) -> Any:
    """Return the state after a round, or None if the contributions' values do not let it be computed or sent.

    Raises:
        SelectionError: the settings cannot be met, whatever the sites send; rejecting a site would not help.
    """
    try:
        next_state = method.learn(state, contributions)
    # Values near the largest float32 can break a decomposition or a selection, which counts as a state with infinities.
    except (ArithmeticError, UndefinedScores, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None
    can_send = endpoint.protection.can_send(method.model(next_state), endpoint.values)
    return next_state if can_send else None
