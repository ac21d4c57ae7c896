"""From a round's contributions to the next state: caps, clipping, rejection of what cannot be sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flare_sparse.core.errors import SelectionError, UndefinedScores, WireError
from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.methods.registry import METHODS
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.federation.rounds import AttemptResult, get_reason_code, learn_from
from flare_sparse.rounds.federation.rules import RoundRules

LAYOUT = Layout.from_module(nn.Linear(3, 1))
FULL = Mask.full(LAYOUT.size)
METHOD = METHODS["fedavg"](METHODS["fedavg"].Config(rounds=1), LAYOUT, 1)


def contribute(site: str, value: float, examples: int = 10) -> Contribution:
    return Contribution(site, Patch(torch.full((LAYOUT.size,), value), FULL), "weights", examples)


def build_result(*contributions: Contribution) -> AttemptResult:
    return AttemptResult(Attempt(1, "train", 1, {}), list(contributions), {}, [])


def learn(*contributions: Contribution, quorum: int = 1) -> tuple[AttemptResult, Tensor | None]:
    """Learn for messages in float16, whose values go up to 65,504."""
    state, rules = METHOD.init(torch.zeros(LAYOUT.size), []), RoundRules()
    after, result = learn_from(
        build_result(*contributions), state, METHOD, "float16", rules, lambda counted: len(counted) >= quorum
    )
    return after, None if result is None else result.state.weights


def test_contributions_with_the_largest_norm_are_rejected_until_the_model_can_be_sent() -> None:
    contributions = [contribute("a", 4e4), contribute("b", 1.2e5), contribute("c", 2e5)]
    after, weights = learn(*contributions)
    assert after.rejected == {"c": "E_RANGE", "b": "E_RANGE"}
    assert [update.site for update in after.accepted] == ["a"]
    assert weights is not None
    assert weights.tolist() == [4e4] * LAYOUT.size


def test_nothing_is_learned_below_the_quorum() -> None:
    after, weights = learn(contribute("a", 4e4), contribute("b", 1.2e5), quorum=2)
    assert (after.rejected, weights) == ({"b": "E_RANGE"}, None)


def test_settings_that_cannot_be_met_raise_and_reject_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(state: object, contributions: object) -> None:
        raise SelectionError("cannot select 9 of 4 entries")

    monkeypatch.setattr(METHOD, "learn", fail)
    with pytest.raises(SelectionError, match="9 of 4"):
        learn(contribute("a", 1.0), contribute("b", 2.0))


def test_values_without_an_order_reject_the_largest_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    known = type(METHOD).learn

    def rank(state: object, contributions: list[Contribution]) -> object:
        if len(contributions) > 1:
            raise UndefinedScores("1 of 4 scores are NaN")
        return known(METHOD, state, contributions)

    monkeypatch.setattr(METHOD, "learn", rank)
    after, weights = learn(contribute("a", 1.0), contribute("b", 2.0))
    assert after.rejected == {"b": "E_RANGE"}
    assert weights is not None


def test_contributions_are_capped_and_clipped_before_they_are_aggregated() -> None:
    state = METHOD.init(torch.zeros(LAYOUT.size), [])
    sites = [contribute("a", 1.0, 10), contribute("b", 1.0, 10), contribute("c", 100.0, 1000)]
    rules = RoundRules(max_share=0.5, clip_norm=4.0)
    _, result = learn_from(
        build_result(*sites),
        state,
        METHOD,
        "float32",
        rules,
        lambda counted: True,
    )
    assert result is not None
    assert result.capped == {"c": 20}
    assert result.clipped == {"c": pytest.approx(200.0)}
    assert result.state.weights.tolist() == pytest.approx([(10 * 1 + 10 * 1 + 20 * 2) / 40] * LAYOUT.size)


def test_update_without_values_or_without_weight_does_not_contribute() -> None:
    empty = Contribution("a", Patch.empty(LAYOUT.size), "metrics", 10)
    result = build_result(empty, contribute("b", 1.0), contribute("c", 1.0, 0))
    assert [update.site for update in result.contributed] == ["b"]


def test_every_kind_of_rejection_has_a_reason_code() -> None:
    assert get_reason_code("E_SITE") == "E_SITE"
    assert get_reason_code(ValueError("x")) == "ValueError"
    assert get_reason_code(WireError("E_SHORT", "header", 128, 3, "a")) == "E_SHORT"
