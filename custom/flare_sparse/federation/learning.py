"""What a round's answers make of the state: weighed, shortened, and refused where that would be no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..aggregation.robust import clipped
from ..endpoints.server import ServerDesk
from ..errors import SelectionError
from ..exchange import Update
from ..methods import Method
from .replies import Tally
from .rules import Rules, capped


@dataclass(frozen=True)
class Learned:
    """``state`` after a round, the updates as they were weighed and shortened, and whose were."""

    state: Any
    updates: list[Update]
    capped: dict[str, int] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)


def learned_from(
    tally: Tally,
    state: Any,
    method: Method[Any],
    desk: ServerDesk,
    rules: Rules,
    enough: Callable[[list[Update]], bool],
) -> tuple[Tally, Learned | None]:
    """What the answers make of ``state``. While that is no model, the answer with the largest values is refused.

    Args:
        tally: of the round.
        state: before it.
        method: learns.
        desk: knows what can be sent.
        rules: how much a site may weigh, how long its change may be.
        enough: whether these answers are a quorum.

    Returns:
        The tally, with answers that were refused; and what was learned, None below the quorum.
    """
    while enough(tally.contributed):
        updates, capped_to = _weighed(tally.contributed, desk, rules)
        before = Tensor() if rules.clip_norm is None else method.model(state).vector()
        updates, cut = clipped(updates, before, rules.clip_norm)
        after = _usable(method, desk, state, updates)
        if after is not None:
            return tally, Learned(after, updates, capped_to, cut)
        loudest = max(tally.contributed, key=lambda u: float(torch.linalg.vector_norm(u.patch.values.double())))
        tally = tally.without(loudest.site, "E_RANGE")
    return tally, None


def _weighed(contributed: list[Update], desk: ServerDesk, rules: Rules) -> tuple[list[Update], dict[str, int]]:
    """The updates as they count, and with how many examples those that count less than they say; 0: not at all."""
    weighed, cut = capped(contributed, rules.max_share)
    light = desk.too_light(weighed)
    return [u for u in weighed if u.site not in light], {**cut, **dict.fromkeys(light, 0)}


def _usable(method: Method[Any], desk: ServerDesk, state: Any, updates: list[Update]) -> Any:
    """The state after a round, or None where it could not be sent: finite answers can have a sum or a product that is
    not.
    """
    try:
        after = method.learn(state, updates)
    except (ArithmeticError, SelectionError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None
    return after if desk.sayable(method.model(after)) else None
