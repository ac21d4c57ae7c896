"""Figures of attacks on known scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flare_sparse.core.errors import DataError
from flare_sparse.results.audit.result import (
    Ranking,
    build_balanced_accuracy,
    build_tpr,
    choose_threshold,
    guess_members,
    measure_rankings,
)

SITES = np.full(6, "a")


def measure(scores: list[float], is_member: list[bool], resamples: int = 20) -> dict[str, Any]:
    values, labels = np.array(scores), np.array(is_member)
    guesses = guess_members(values, labels)
    ranking = Ranking(np.arange(len(values)), values, guesses)
    return measure_rankings([ranking], labels, np.full(len(values), "a"), resamples)


def test_planted_leak_has_the_exact_figures() -> None:
    # Of 9 pairs of a member and a non-member, 7 have the member ahead and one ties: (7 + 0.5) / 9.
    figures = measure([0.9, 0.8, 0.3, 0.5, 0.3, 0.1], [True, True, True, False, False, False])
    assert figures["auc"] == pytest.approx(7.5 / 9)
    # No non-member may exceed the threshold: the two members above 0.5.
    assert figures["tpr_at_1_percent_fpr"] == pytest.approx(2 / 3)


def test_separated_scores_are_a_complete_leak() -> None:
    figures = measure([9.0, 8, 7, 6, -6, -7, -8, -9], [True] * 4 + [False] * 4, resamples=50)
    names = ("auc", "balanced_accuracy", "tpr_at_1_percent_fpr")
    assert figures == {**dict.fromkeys(names, 1.0), "interval": [1.0, 1.0], "intervals": {n: [1.0, 1.0] for n in names}}


def test_scores_without_information_are_at_chance_within_their_interval() -> None:
    generator = np.random.default_rng(3)
    labels = np.arange(2000) % 2 == 0
    figures = measure(generator.normal(size=2000).tolist(), labels.tolist(), resamples=200)
    for name in ("auc", "balanced_accuracy"):
        assert figures[name] == pytest.approx(0.5, abs=0.03)
        low, high = figures["intervals"][name]
        assert low < 0.5 < high
    assert figures["tpr_at_1_percent_fpr"] < 0.04


def test_true_positives_are_counted_at_the_allowed_false_ones() -> None:
    labels = np.array([True] * 4 + [False] * 100)
    scores = np.array([10.0, 9, 1, 0, 9.5, *np.linspace(-9, -1, 99)])
    weights = np.ones((1, 104), dtype=np.int64)
    assert build_tpr(scores, labels, 0.01)(weights) == [1.0]
    assert build_tpr(scores, labels, 0.001)(weights) == [0.25]
    # A non-member that is not drawn accuses nothing.
    weights[0, 4] = 0
    assert build_tpr(scores, labels, 0.001)(weights) == [1.0]


def test_equal_scores_share_a_threshold() -> None:
    labels = np.array([True, True, False])
    weights = np.ones((1, 3), dtype=np.int64)
    assert build_tpr(np.array([1.0, 1, 1]), labels, 0.01)(weights) == [0.0]


def test_balanced_accuracy_weighs_members_and_non_members_equally() -> None:
    labels, guesses = np.array([True, True, True, True, False]), np.array([True, True, True, False, False])
    assert build_balanced_accuracy(guesses, labels)(np.ones((1, 5), dtype=np.int64)) == [(0.75 + 1) / 2]


def test_threshold_lies_between_the_scores_that_it_separates() -> None:
    assert choose_threshold(np.array([1.0, 2, 5, 6]), np.array([False, False, True, True])) == 3.5


def test_figures_are_means_over_rankings() -> None:
    labels = np.array([True, False, True, False])
    right = Ranking(np.array([0, 1]), np.array([1.0, 0]), np.array([True, False]))
    wrong = Ranking(np.array([2, 3]), np.array([0.0, 1]), np.array([False, True]))
    figures = measure_rankings([right, wrong], labels, np.array(["a", "a", "b", "b"]), 20)
    assert (figures["auc"], figures["balanced_accuracy"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("scores", "labels", "text"),
    [([1.0, np.nan], [True, False], "not a number"), ([1.0, 2.0], [True, True], "members and non-members")],
)
def test_attack_without_figures_is_an_error(scores: list[float], labels: list[bool], text: str) -> None:
    rows = np.arange(2)
    with pytest.raises(DataError, match=text):
        measure_rankings([Ranking(rows, np.array(scores), rows > 0)], np.array(labels), np.full(2, "a"))
