"""Weights of sites, registered numbers of examples, quarantine and quorum."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.methods.aggregation.weighted import normalize_capped
from flare_sparse.rounds.federation.records import Evaluation
from flare_sparse.rounds.federation.rules import MAX_QUARANTINE_ROUNDS, RoundRules, SiteHistory, cap_contributions

SITES = ["a", "b", "c", "d"]


def update(site: str, examples: int) -> Contribution:
    return Contribution(site, Patch.empty(1), "weights", examples)


def weights(*examples: int) -> list[Contribution]:
    return [update(f"site-{i}", n) for i, n in enumerate(examples)]


@given(
    examples=st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    max_share=st.floats(0.05, 1.0, exclude_max=True),
)
def test_cap_keeps_every_site_below_its_share_and_raises_no_weight(examples: list[int], max_share: float) -> None:
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


def test_site_with_a_huge_number_of_examples_is_capped() -> None:
    after, cut = cap_contributions(weights(100, 120, 2**52), 0.5)
    assert [u.num_examples for u in after] == [100, 120, 220]
    assert cut == {"site-2": 220}


def test_max_share_of_one_changes_no_weight() -> None:
    before = weights(3, 4)
    assert cap_contributions(before, 1.0) == (before, {})


@pytest.mark.parametrize(
    ("examples", "is_accepted"), [(100, True), (109, True), (91, True), (112, False), (80, False), (0, False)]
)
def test_number_of_examples_must_stay_near_the_registered_one(examples: int, is_accepted: bool) -> None:
    assert SiteHistory().find_violation(update("a", 100), RoundRules()) is None
    history = SiteHistory().register(update("a", 100))
    assert history.find_violation(update("a", examples), RoundRules()) == (None if is_accepted else "E_WEIGHT")


def test_number_of_test_examples_must_stay_near_the_registered_one() -> None:
    history, violations = SiteHistory(), []
    reported = [replace(update("a", 100), metrics={"mse": 1.0, "test_examples": n}) for n in (20.0, 21.0, 2.0**52)]
    assert history.find_violation(update("a", 100), RoundRules()) is None, "scores come without metrics"
    history = history.register(update("a", 100))
    assert history.evaluated == {}
    for contribution in reported:
        violations.append(history.find_violation(contribution, RoundRules()))
        if violations[-1] is None:
            history = history.register(contribution)
    assert violations == [None, None, "E_METRICS"]
    assert history == SiteHistory(registered={"a": 100}, evaluated={"test_examples": {"a": 20.0}})


def test_number_of_examples_must_not_exceed_the_known_one() -> None:
    history, rules = SiteHistory(), RoundRules(examples={"a": 100}, examples_tolerance=0.0)
    assert [history.find_violation(update("a", n), rules) for n in (2**52, 101, 100)] == ["E_WEIGHT", "E_WEIGHT", None]
    assert history.find_violation(update("b", 2**52), rules) is None, "no number is known of this site"


def test_registered_examples_are_capped_before_a_share_is_computed() -> None:
    history = SiteHistory(registered={"a": 100, "b": 100, "c": 2**52})
    assert history.compute_share(["a", "b"], ["a", "b", "c"]) < 1e-9
    assert history.compute_share(["a", "b"], ["a", "b", "c"], 0.5) == 0.5


def evaluate(site: str, mse: float, tests: float) -> Contribution:
    return replace(update(site, 1), metrics={"mse": mse, "test_examples": tests})


def test_site_without_test_examples_stays_in_the_evaluation_and_out_of_its_means() -> None:
    sites = [evaluate("a", 1.0, 10), evaluate("b", 3.0, 30), update("c", 5)]
    evaluation = Evaluation.from_contributions(sites)
    assert evaluation.sites == {"a": sites[0].metrics, "b": sites[1].metrics, "c": {}}
    assert evaluation.overall == {"mse": 2.5, "test_examples": 40}
    assert Evaluation.from_contributions([update("a", 1), update("c", 5)]) == Evaluation({}, {})


def test_no_site_exceeds_its_share_of_an_evaluation() -> None:
    sites = [evaluate("a", 1.0, 10), evaluate("b", 3.0, 30), evaluate("c", 0.0, 2.0**52)]
    assert Evaluation.from_contributions(sites).overall["mse"] < 1e-9
    assert Evaluation.from_contributions(sites, 0.5).overall == {"mse": (10 + 90) / 80, "test_examples": 80}
    assert (
        Evaluation.from_contributions(sites[:2], 0.99).overall
        == Evaluation.from_contributions(sites[:2]).overall
        == {"mse": 2.5, "test_examples": 40}
    )


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=9), st.floats(0.05, 1.0))
def test_normalized_weights_sum_to_one_and_keep_the_cap(numbers: list[float], max_share: float) -> None:
    assume(sum(numbers) > 1e-3)
    shares = normalize_capped(numbers, max_share)
    assert sum(shares) == pytest.approx(1)
    enough = max_share * sum(number > 0 for number in numbers) >= 1
    assert not enough or max(shares) <= max_share * (1 + 1e-6)
    if max_share >= 1:
        assert shares == [number / sum(numbers) for number in numbers]


def test_quarantine_doubles_with_each_miss_and_ends_with_one_update() -> None:
    history, rules = SiteHistory(), RoundRules(quarantine_after=3)
    asked = []
    for _ in range(60):
        present = history.select_available(SITES, rules)
        asked.append("d" in present)
        history = history.record_round([s for s in present if s != "d"], present, rules)
    quarantines = [len(run) for run in "".join("x" if is_asked else "." for is_asked in asked).split("x") if run]
    assert asked[:3] == [True] * 3
    assert quarantines[:5] == [1, 2, 4, 8, MAX_QUARANTINE_ROUNDS]
    history = replace(history, quarantined={}).record_round(SITES, SITES, rules)
    assert history.missed == history.quarantined == {}


def test_quarantined_sites_are_asked_when_too_few_others_are_left() -> None:
    history = SiteHistory(quarantined={"a": 4, "b": 4, "c": 4})
    assert history.select_available(SITES, RoundRules(min_sites=2)) == SITES
    assert history.select_available(SITES, RoundRules(min_sites=1)) == ["d"]


def test_unregistered_site_counts_with_the_mean_of_the_others() -> None:
    history = SiteHistory(registered={"a": 100, "b": 300})
    assert history.compute_share(["a"], ["a", "b"]) == 0.25
    assert history.compute_share(["a", "b"], ["a", "b", "c"]) == pytest.approx(400 / 600)
    assert SiteHistory().compute_share(["a"], ["a", "b"]) == 0.5
