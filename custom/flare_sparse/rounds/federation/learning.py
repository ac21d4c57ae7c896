"""From a round's contributions to the next state of the method.

Updates that are far larger than the others of their round, or point against them, are named.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.errors import UndefinedScores
from ...core.exchange import Contribution, Patch
from ...core.mask import Mask
from ...methods.aggregation.weighted import clip_deltas
from ...methods.method import Method
from ...wire.formats import FORMATS, ValueType
from .roster import AttemptResult
from .rules import RoundRules, cap_contributions

FEWEST = 3
"""With fewer updates than this, the median does not tell which of them is the outlier."""
OPPOSED = 2
"""How far a delta goes against the mean direction of the others, in lengths of the round's median delta, from which on
the record says so. In honest federations a delta went up to one length against the others (docs/reliability.md)."""
SAMPLED = 2**16
"""Entries, evenly spread, by which directions are compared: a pass over all of them would take as long as their sum."""


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
    examined = _select_readable(result)
    if max_ratio is None or len(examined) < FEWEST:
        return result
    previous = _read_previous(examined, get_previous)
    norms = {contribution.site: _compute_norm(contribution, previous) for contribution in examined}
    typical = median(norms.values())
    # A median of zero: most sites sent nothing, and any update is infinitely longer.
    if not typical:
        return result
    # "not <=" and not ">", which NaN, the norm of inf - inf, would pass.
    for site in sorted(site for site, norm in norms.items() if not norm <= max_ratio * typical):
        result = result.reject(site, "E_NORM")
    return result


def find_opposed(result: AttemptResult, get_previous: Callable[[], Patch]) -> list[str]:
    """Return the sites whose delta takes back what the others learn: see :data:`OPPOSED`.

    A cosine alone would not tell them: in honest federations some site points against the others, while a site that
    sends its own delta backwards does so no more than it agreed with them before. What differs is the length.

    The others count with one direction each, however long their deltas are. At most :data:`SAMPLED` entries are
    compared. Updates of different entries and summed ones are not examined.

    Args:
        result: replies of an attempt.
        get_previous: returns the model that the sites started from; called only if an update holds weights.
    """
    examined = _select_readable(result)
    if len(examined) < FEWEST or any(c.patch.mask != examined[0].patch.mask for c in examined):
        return []
    previous = _read_previous(examined, get_previous)
    every = -(-examined[0].patch.mask.count // SAMPLED) or 1
    deltas = torch.stack([_compute_delta(contribution, previous, every).double() for contribution in examined])
    directions = functional.normalize(deltas)
    others = functional.normalize(directions.sum(0) - directions)
    along, typical = (deltas * others).sum(1).tolist(), median(deltas.norm(dim=1).tolist())
    # A median of zero: most sites learn nothing that could be taken back.
    return [c.site for c, length in zip(examined, along, strict=True) if length < -OPPOSED * typical < 0]


def _select_readable(result: AttemptResult) -> list[Contribution]:
    """Return the contributions whose values are deltas or weights that the server reads."""
    # Values that are summed unread are NaN at the server.
    if result.total is not None:
        return []
    return [c for c in result.contributed if c.content in ("weights", "delta")]


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


def _read_previous(examined: list[Contribution], get_previous: Callable[[], Patch]) -> _Previous | None:
    """Return the model that the sites trained from, which takes a copy; None where updates are deltas already."""
    return _Previous(get_previous()) if any(c.content == "weights" for c in examined) else None


def _compute_delta(contribution: Contribution, previous: _Previous | None, every: int = 1) -> Tensor:
    """Return a contribution's delta, float32 ``(n,)``, on ``every``-th entry of its mask."""
    values = contribution.patch.values[::every]
    if contribution.content == "weights" and previous is not None:
        return values - previous.take(contribution.patch.mask)[::every]
    return values


def _compute_norm(contribution: Contribution, previous: _Previous | None) -> float:
    """Return the L2 norm of a contribution's delta, infinite if it overflows float32."""
    return float(torch.linalg.vector_norm(_compute_delta(contribution, previous)))


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
