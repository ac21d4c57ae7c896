"""No combination of the sums that a deviating server reads isolates few sites; under an earlier rule one did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import ModuleType

import pytest
from scripts import load_script

from flare_sparse.privacy.secure_aggregation.limits import compute_threshold, count_needed
from flare_sparse.wire.stage import RevealedSum


@pytest.fixture(scope="module")
def search() -> ModuleType:
    """The search, which runs for minutes as a script."""
    return load_script("faults/masked_sums")


def refuse_small_differences(earlier: Iterable[RevealedSum], new: RevealedSum) -> str:
    """The earlier rule: at most two sets of a request, which differ by three sites or more."""
    known = {frozenset(entry.survivors) for entry in earlier if entry.run == new.run}
    survivors = frozenset(new.survivors)
    is_small = any(len(survivors ^ sites) < 3 for sites in known)
    return "refused" if survivors not in known and (is_small or len(known) > 1) else ""


@pytest.mark.slow
@pytest.mark.parametrize("choices", ["attempts", "jobs"])
def test_no_attempts_of_up_to_five_sites_isolate_few_of_them(search: ModuleType, choices: str) -> None:
    counts: Counter[str] = Counter()
    for sites, min_sites in ((3, 3), (4, 3), (4, 4), (5, 3), (5, 4), (5, 5)):
        assert search.search_all(sites, min_sites, choices, search.Rules(), counts) == []
    assert counts["combinations"] > 30_000


@pytest.mark.slow
@pytest.mark.parametrize("sites", [6, 9, 12])
def test_no_random_attempts_isolate_few_sites(search: ModuleType, sites: int) -> None:
    counts: Counter[str] = Counter()
    for min_sites in (3, 5):
        assert search.search_at_random(sites, min_sites, 10, search.Rules(), 1, counts) == []
    assert counts["sequences"] > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "choices", "factors"),
    [(5, "attempts", [(1, 1, 1, 1, 1), (0, 1, 1, 1, 1)]), (3, "jobs", [(7, 2, 5), (1, 1, 1)])],
)
def test_search_finds_two_sums_under_the_earlier_rule(
    search: ModuleType, sites: int, choices: str, factors: list[tuple[int, ...]]
) -> None:
    rules, counts = search.Rules(find_violation=refuse_small_differences), Counter()
    found = search.search_all(sites, 3, choices, rules, counts)
    assert [ask.build_row(ask.members, sites) for ask in found] == factors
    assert search.search_at_random(6, 3, 100, rules, 1, counts)


def test_lies_about_survivors_are_why_more_than_the_threshold_must_be_left(search: ModuleType) -> None:
    """A server that told each of 12 sites of three others that they are lost would read a sum over 8, below 9."""
    told = [{8, 9, 10}, {8, 9, 11}, {8, 10, 11}, {9, 10, 11}]
    # No site is told of itself that it is lost.
    denied = [told[site % 4] for site in range(8)] + [{8, 9, 10, 11} - {site} for site in range(8, 12)]
    lists = {site: frozenset(range(12)) - lost for site, lost in enumerate(denied)}
    threshold = compute_threshold(12, 9)
    assert {len(survivors) for survivors in lists.values()} == {threshold} == {9}
    assert search.read_sum(range(12), lists, threshold) == frozenset(range(8))
    assert count_needed(12, 9) == 10
    # Up to a minimum of six the threshold is enough.
    assert all(count_needed(n, m) == compute_threshold(n, m) for n in range(3, 60) for m in range(3, min(n, 6) + 1))
