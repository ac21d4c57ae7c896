"""Who is asked, who weighs how much, and that every site asked is accounted for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.exchange import Patch, Update
from flare_sparse.federation.rules import LONGEST_REST, Roster, Rules, capped

SITES = ["a", "b", "c", "d"]


def update(site: str, examples: int) -> Update:
    return Update(Patch.empty(1), "weights", examples, site=site)


def weights(*examples: int) -> list[Update]:
    return [update(f"site-{i}", n) for i, n in enumerate(examples)]


@given(
    examples=st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    max_share=st.floats(0.05, 1.0, exclude_max=True),
)
def test_no_site_weighs_more_than_its_share_and_nobody_gains(examples: list[int], max_share: float) -> None:
    before = weights(*examples)
    after, cut = capped(before, max_share)
    total = sum(u.examples for u in after)
    assert [u.site for u in after] == [u.site for u in before]
    assert all(1 <= new.examples <= old.examples for new, old in zip(after, before, strict=True))
    assert cut == {n.site: n.examples for n, o in zip(after, before, strict=True) if n.examples != o.examples}
    if len(examples) * max_share >= 1:
        floor = min(examples) * len(examples)  # rounding down to whole examples cannot do better than equal weights
        assert all(u.examples <= max(max_share * total * (1 + 1e-9), floor / len(examples)) for u in after)
    else:
        assert len({u.examples for u in after}) == 1


def test_a_site_with_ten_to_the_thirty_examples_does_not_take_over() -> None:
    after, cut = capped(weights(100, 120, 2**52), 0.5)
    assert [u.examples for u in after] == [100, 120, 220]
    assert cut == {"site-2": 220}


def test_without_a_cap_nothing_changes() -> None:
    before = weights(3, 4)
    assert capped(before, 1.0) == (before, {})


@pytest.mark.parametrize(("now", "fits"), [(100, True), (109, True), (91, True), (112, False), (80, False), (0, False)])
def test_a_site_stays_with_the_number_of_examples_that_it_registered(now: int, fits: bool) -> None:
    roster = Roster()
    assert roster.agrees(update("a", 100), Rules())
    assert roster.agrees(update("a", now), Rules()) is fits


def test_a_site_that_misses_rests_longer_each_time_and_comes_back_with_one_answer() -> None:
    roster, rules = Roster(), Rules(quarantine_after=3)
    asked = []
    for _ in range(60):
        present = roster.present(SITES, rules)
        asked.append("d" in present)
        roster.heard([s for s in present if s != "d"], present, rules)
    rests = [len(run) for run in "".join("x" if there else "." for there in asked).split("x") if run]
    assert asked[:3] == [True] * 3
    assert rests[:5] == [1, 2, 4, 8, LONGEST_REST]
    roster.resting.clear()
    roster.heard(SITES, SITES, rules)
    assert roster.missed == roster.resting == {}


def test_when_too_few_are_left_everybody_is_asked() -> None:
    roster = Roster(resting={"a": 4, "b": 4, "c": 4})
    assert roster.present(SITES, Rules(min_sites=2)) == SITES
    assert roster.present(SITES, Rules(min_sites=1)) == ["d"]


def test_the_quorum_by_weight_counts_who_never_registered_as_the_mean() -> None:
    roster = Roster(registered={"a": 100, "b": 300})
    assert roster.share(["a"], ["a", "b"]) == 0.25
    assert roster.share(["a", "b"], ["a", "b", "c"]) == pytest.approx(400 / 600)
    assert Roster().share(["a"], ["a", "b"]) == 0.5
