"""What a round's answers make of the state."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from flare_sparse.endpoints.server import Attempt
from flare_sparse.errors import WireError
from flare_sparse.exchange import Contribution, Patch
from flare_sparse.federation import RoundRules
from flare_sparse.federation.learning import learn_from
from flare_sparse.federation.replies import AttemptResult, get_reason_code
from flare_sparse.mask import Mask
from flare_sparse.methods import METHODS
from flare_sparse.params import Layout

LAYOUT = Layout.from_module(nn.Linear(3, 1))
FULL = Mask.full(LAYOUT.size)
METHOD = METHODS["fedavg"](METHODS["fedavg"].Config(rounds=1), LAYOUT, 1)


@dataclass
class Desk:
    """What the server's desk says of a model and of weights: a model beyond ``largest`` cannot be sent."""

    largest: float = 2.0**60
    light: frozenset[str] = frozenset()

    def is_encodable(self, model: Patch) -> bool:
        return bool((model.values.abs() <= self.largest).all())

    def find_underweight_sites(self, updates: list[Contribution]) -> set[str]:
        return set(self.light)


def answer(site: str, value: float, examples: int = 10) -> Contribution:
    return Contribution(site, Patch(torch.full((LAYOUT.size,), value), FULL), "weights", examples)


def tally(*answers: Contribution) -> AttemptResult:
    return AttemptResult(Attempt(1, "train", 1, {}), list(answers), {}, [])


def learned(
    endpoint: Desk, rules: RoundRules, *answers: Contribution, quorum: int = 1
) -> tuple[AttemptResult, Tensor | None]:
    state = METHOD.init(torch.zeros(LAYOUT.size), [])
    after, found = learn_from(tally(*answers), state, METHOD, endpoint, rules, lambda them: len(them) >= quorum)  # type: ignore[arg-type]
    return after, None if found is None else found.state.weights


def test_the_answer_with_the_largest_values_is_refused_until_there_is_a_model() -> None:
    loud = [answer("a", 1.0), answer("b", 3.0), answer("c", 5.0)]
    after, weights = learned(Desk(largest=1.5), RoundRules(), *loud)
    assert after.rejected == {"c": "E_RANGE", "b": "E_RANGE"}
    assert [update.site for update in after.answered] == ["a"]
    assert weights is not None
    assert weights.tolist() == [1.0] * LAYOUT.size


def test_below_the_quorum_nothing_is_learned() -> None:
    after, weights = learned(Desk(largest=1.5), RoundRules(), answer("a", 1.0), answer("b", 3.0), quorum=2)
    assert (after.rejected, weights) == ({"b": "E_RANGE"}, None)


def test_answers_are_weighed_and_shortened_before_they_are_learned_from() -> None:
    state = METHOD.init(torch.zeros(LAYOUT.size), [])
    sites = [answer("a", 1.0, 10), answer("b", 1.0, 10), answer("c", 100.0, 1000), answer("d", 9.0, 10)]
    rules = RoundRules(max_share=0.5, clip_norm=4.0)
    _, found = learn_from(
        tally(*sites),
        state,
        METHOD,
        Desk(light=frozenset({"d"})),
        rules,
        lambda them: True,  # type: ignore[arg-type]
    )
    assert found is not None
    assert found.capped == {"c": 30, "d": 0}
    assert found.clipped == {"c": pytest.approx(200.0)}
    assert [update.num_examples for update in found.updates] == [10, 10, 30]
    assert found.state.weights.tolist() == pytest.approx([(10 * 1 + 10 * 1 + 30 * 2) / 50] * LAYOUT.size)


def test_what_carries_nothing_is_no_contribution() -> None:
    empty = Contribution("a", Patch.empty(LAYOUT.size), "metrics", 10)
    answers = tally(empty, answer("b", 1.0), answer("c", 1.0, 0))
    assert [update.site for update in answers.contributed] == ["b"]


def test_a_rejection_has_a_code_whatever_it_was() -> None:
    assert get_reason_code("E_SITE") == "E_SITE"
    assert get_reason_code(ValueError("x")) == "ValueError"
    assert get_reason_code(WireError("E_SHORT", "header", 128, 3, "a")) == "E_SHORT"
