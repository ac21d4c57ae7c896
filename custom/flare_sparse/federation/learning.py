"""What a round's answers make of the state: weighed, shortened, and refused where that would be no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..aggregation.robust import clip_deltas
from ..endpoints.server import ServerEndpoint
from ..errors import SelectionError
from ..exchange import Contribution
from ..methods import Method
from .replies import AttemptResult
from .rules import RoundRules, cap_contributions


@dataclass(frozen=True)
class LearnResult:
    """``state`` after a round, the updates as they were weighed and shortened, and whose were."""

    state: Any
    updates: list[Contribution]
    capped: dict[str, int] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)


def learn_from(
    tally: AttemptResult,
    state: Any,
    method: Method[Any],
    endpoint: ServerEndpoint,
    rules: RoundRules,
    enough: Callable[[list[Contribution]], bool],
) -> tuple[AttemptResult, LearnResult | None]:
    """What the answers make of ``state``. While that is no model, the answer with the largest values is refused.

    Args:
        tally: of the round.
        state: before it.
        method: learns.
        endpoint: knows what can be sent.
        rules: how much a site may weigh, how long its change may be.
        enough: whether these answers are a quorum.

    Returns:
        The tally, with answers that were refused; and what was learned, None below the quorum.
    """
    while enough(tally.contributed):
        updates, capped_to = _weighed(tally.contributed, endpoint, rules)
        before = Tensor() if rules.clip_norm is None else method.model(state).to_vector()
        updates, cut = clip_deltas(updates, before, rules.clip_norm)
        after = _usable(method, endpoint, state, updates)
        if after is not None:
            return tally, LearnResult(after, updates, capped_to, cut)
        loudest = max(tally.contributed, key=lambda u: float(torch.linalg.vector_norm(u.patch.values.double())))
        tally = tally.without(loudest.site, "E_RANGE")
    return tally, None


def _weighed(
    contributed: list[Contribution], endpoint: ServerEndpoint, rules: RoundRules
) -> tuple[list[Contribution], dict[str, int]]:
    """The updates as they count, and with how many examples those that count less than they say; 0: not at all."""
    weighed, cut = cap_contributions(contributed, rules.max_share)
    light = endpoint.find_underweight_sites(weighed)
    return [u for u in weighed if u.site not in light], {**cut, **dict.fromkeys(light, 0)}


def _usable(method: Method[Any], endpoint: ServerEndpoint, state: Any, updates: list[Contribution]) -> Any:
    """The state after a round, or None where it could not be sent: finite answers can have a sum or a product that is
    not.
    """
    try:
        after = method.learn(state, updates)
    except (ArithmeticError, SelectionError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None
    return after if endpoint.is_encodable(method.model(after)) else None
