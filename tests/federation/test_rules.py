"""Who is asked, who weighs how much, and that every site asked is accounted for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flare_sparse.aggregation.weighted import normalize_capped
from flare_sparse.exchange import Contribution, Patch
from flare_sparse.federation import Evaluation
from flare_sparse.federation.rules import MAX_QUARANTINE_ROUNDS, Roster, RoundRules, cap_contributions

SITES = ["a", "b", "c", "d"]


def update(site: str, examples: int) -> Contribution:
    return Contribution(site, Patch.empty(1), "weights", examples)


def weights(*examples: int) -> list[Contribution]:
    return [update(f"site-{i}", n) for i, n in enumerate(examples)]


@given(
    examples=st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    max_share=st.floats(0.05, 1.0, exclude_max=True),
)
def test_no_site_weighs_more_than_its_share_and_nobody_gains(examples: list[int], max_share: float) -> None:
    before = weights(*examples)
    after, cut = cap_contributions(before, max_share)
    total = sum(u.num_examples for u in after)
    assert [u.site for u in after] == [u.site for u in before]
    assert all(1 <= new.num_examples <= old.num_examples for new, old in zip(after, before, strict=True))
    assert cut == {
        n.site: n.num_examples for n, o in zip(after, before, strict=True) if n.num_examples != o.num_examples
    }
    if len(examples) * max_share >= 1:
        floor = min(examples) * len(examples)  # rounding down to whole examples cannot do better than equal weights
        assert all(u.num_examples <= max(max_share * total * (1 + 1e-9), floor / len(examples)) for u in after)
    else:
        assert len({u.num_examples for u in after}) == 1


def test_a_site_with_ten_to_the_thirty_examples_does_not_take_over() -> None:
    after, cut = cap_contributions(weights(100, 120, 2**52), 0.5)
    assert [u.num_examples for u in after] == [100, 120, 220]
    assert cut == {"site-2": 220}


def test_without_a_cap_nothing_changes() -> None:
    before = weights(3, 4)
    assert cap_contributions(before, 1.0) == (before, {})


@pytest.mark.parametrize(("now", "fits"), [(100, True), (109, True), (91, True), (112, False), (80, False), (0, False)])
def test_a_site_stays_with_the_number_of_examples_that_it_registered(now: int, fits: bool) -> None:
    roster = Roster()
    assert roster.find_violation(update("a", 100), RoundRules()) is None
    assert roster.find_violation(update("a", now), RoundRules()) == (None if fits else "E_WEIGHT")


def test_test_examples_are_registered_like_training_examples() -> None:
    roster = Roster()
    said = [replace(update("a", 100), metrics={"mse": 1.0, "test_examples": n}) for n in (20.0, 21.0, 2.0**52)]
    assert roster.find_violation(update("a", 100), RoundRules()) is None, "scores come without a judgement"
    assert [roster.find_violation(one, RoundRules()) for one in said] == [None, None, "E_METRICS"]


def test_what_was_agreed_beforehand_is_the_most_that_a_site_may_say() -> None:
    roster, rules = Roster(), RoundRules(examples={"a": 100}, examples_tolerance=0.0)
    assert [roster.find_violation(update("a", n), rules) for n in (2**52, 101, 100)] == ["E_WEIGHT", "E_WEIGHT", None]
    assert roster.find_violation(update("b", 2**52), rules) is None, "of whom nothing was agreed"


def test_a_registered_claim_is_cut_before_a_share_is_made_of_it() -> None:
    roster = Roster(registered={"a": 100, "b": 100, "c": 2**52})
    assert roster.compute_share(["a", "b"], ["a", "b", "c"]) < 1e-9
    assert roster.compute_share(["a", "b"], ["a", "b", "c"], 0.5) == 0.5


def judged(site: str, mse: float, tests: float) -> Contribution:
    return replace(update(site, 1), metrics={"mse": mse, "test_examples": tests})


def test_no_site_is_more_than_its_share_of_a_judgement() -> None:
    sites = [judged("a", 1.0, 10), judged("b", 3.0, 30), judged("c", 0.0, 2.0**52)]
    assert Evaluation.from_updates(sites).overall["mse"] < 1e-9
    assert Evaluation.from_updates(sites, 0.5).overall == {"mse": (10 + 90) / 80, "test_examples": 80}
    assert (
        Evaluation.from_updates(sites[:2], 0.99).overall
        == Evaluation.from_updates(sites[:2]).overall
        == {"mse": 2.5, "test_examples": 40}
    )


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=9), st.floats(0.05, 1.0))
def test_shares_add_up_to_one_and_keep_to_the_largest(numbers: list[float], max_share: float) -> None:
    assume(sum(numbers) > 1e-3)
    shares = normalize_capped(numbers, max_share)
    assert sum(shares) == pytest.approx(1)
    enough = max_share * sum(number > 0 for number in numbers) >= 1
    assert not enough or max(shares) <= max_share * (1 + 1e-6)
    if max_share >= 1:
        assert shares == [number / sum(numbers) for number in numbers]


def test_a_site_that_misses_rests_longer_each_time_and_comes_back_with_one_answer() -> None:
    roster, rules = Roster(), RoundRules(quarantine_after=3)
    asked = []
    for _ in range(60):
        present = roster.select_available(SITES, rules)
        asked.append("d" in present)
        roster.record_round([s for s in present if s != "d"], present, rules)
    rests = [len(run) for run in "".join("x" if there else "." for there in asked).split("x") if run]
    assert asked[:3] == [True] * 3
    assert rests[:5] == [1, 2, 4, 8, MAX_QUARANTINE_ROUNDS]
    roster.quarantined.clear()
    roster.record_round(SITES, SITES, rules)
    assert roster.missed == roster.quarantined == {}


def test_when_too_few_are_left_everybody_is_asked() -> None:
    roster = Roster(quarantined={"a": 4, "b": 4, "c": 4})
    assert roster.select_available(SITES, RoundRules(min_sites=2)) == SITES
    assert roster.select_available(SITES, RoundRules(min_sites=1)) == ["d"]


def test_the_quorum_by_weight_counts_who_never_registered_as_the_mean() -> None:
    roster = Roster(registered={"a": 100, "b": 300})
    assert roster.compute_share(["a"], ["a", "b"]) == 0.25
    assert roster.compute_share(["a", "b"], ["a", "b", "c"]) == pytest.approx(400 / 600)
    assert Roster().compute_share(["a"], ["a", "b"]) == 0.5
