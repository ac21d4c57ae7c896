"""Figures of an attack: AUC, accuracy and true positives at few false alarms, with bootstrap intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import DataError
from ...core.ranking import Statistic, build_auc
from ..runs.bootstrap import LEVEL, iterate_resamples

FIGURES = ("auc", "balanced_accuracy", "tpr_at_1_percent_fpr")
"""Figures of every attack."""
RESAMPLES = 1000
"""Resamples of the bootstrap."""


@dataclass(frozen=True)
class Ranking:
    """How an attacker ranks some of the examples.

    Attributes:
        rows: ``(m,)`` indices of the examples.
        scores: ``(m,)``; higher: rather a member.
        guesses: ``(m,)`` bool: called a member.
    """

    rows: np.ndarray
    scores: np.ndarray
    guesses: np.ndarray


def measure_rankings(
    rankings: Sequence[Ranking], is_member: np.ndarray, sites: np.ndarray, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """Return the figures of an attack by name, means over its rankings, and their 95 % bootstrap ``intervals``.

    ``interval`` is that of the AUC.

    Args:
        rankings: one for each model or pair of sites that is attacked.
        is_member: ``(n,)`` bool.
        sites: ``(n,)`` site of each example; members and non-members of a site are resampled separately.
        resamples: number of resamples.

    Raises:
        DataError: a score is not a number, or a ranking has no members or no non-members.
    """
    parts: list[tuple[np.ndarray, tuple[Statistic, ...]]] = []
    for ranking in rankings:
        labels = is_member[ranking.rows]
        if np.isnan(ranking.scores).any():
            raise DataError("a score of an attack is not a number; look for NaN in the model or the data of the run")
        if labels.all() or not labels.any():
            raise DataError("an attack needs members and non-members: training examples and test examples of a site")
        auc = build_auc(ranking.scores, labels[:, None].astype(float))
        accuracy, tpr = build_balanced_accuracy(ranking.guesses, labels), build_tpr(ranking.scores, labels, 0.01)
        parts.append((ranking.rows, (auc, accuracy, tpr)))

    def measure(weights: np.ndarray) -> np.ndarray:
        """Return the figures ``(ranking, figure, resample)``."""
        return np.array([[statistic(weights[:, rows]) for statistic in own] for rows, own in parts])

    figures = measure(np.ones((1, len(is_member)), dtype=np.int64))[:, :, 0].T
    strata = np.array([f"{site} {label}" for site, label in zip(sites, is_member, strict=True)])
    drawn = [measure(weights).mean(axis=0) for weights in iterate_resamples(strata, resamples)]
    bounds = np.nanquantile(np.concatenate(drawn, axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
    intervals = dict(zip(FIGURES, bounds.T.tolist(), strict=True))
    values = {name: float(np.mean(own)) for name, own in zip(FIGURES, figures, strict=True)}
    return {**values, "interval": intervals["auc"], "intervals": intervals}


def build_balanced_accuracy(guesses: np.ndarray, is_member: np.ndarray) -> Statistic:
    """Return the mean of the shares of members and of non-members that are guessed, as a function of weights."""

    def compute(weights: np.ndarray) -> np.ndarray:
        members, others = weights[:, is_member], weights[:, ~is_member]
        hits = members @ guesses[is_member] / members.sum(1), others @ ~guesses[~is_member] / others.sum(1)
        return np.asarray((hits[0] + hits[1]) / 2)

    return compute


def build_tpr(scores: np.ndarray, is_member: np.ndarray, rate: float) -> Statistic:
    """Return the largest share of members above a threshold that at most ``rate`` of the non-members exceed.

    With fewer than ``1 / rate`` non-members no non-member may exceed it.
    """
    order = np.argsort(-scores, kind="stable")
    ranked, member = scores[order], is_member[order]
    # A threshold lies between different scores only.
    ends = np.append(ranked[1:] != ranked[:-1], True)

    def compute(weights: np.ndarray) -> np.ndarray:
        drawn = weights[:, order].astype(np.float64)
        true = np.cumsum(drawn * member, axis=1)
        false = np.cumsum(drawn * ~member, axis=1)
        allowed = ends & (false <= rate * false[:, -1:])
        return np.asarray(np.where(allowed, true, 0.0).max(axis=1) / true[:, -1])

    return compute


def guess_members(scores: np.ndarray, is_member: np.ndarray) -> np.ndarray:
    """Return guesses ``(n,)`` bool whose threshold comes from the other half of the examples.

    A threshold chosen on the examples that it is applied to would look better than chance on scores without any
    information.
    """
    fold = np.zeros(len(scores), dtype=int)
    for label in (True, False):
        rows = np.flatnonzero(is_member == label)
        fold[rows] = np.arange(len(rows)) % 2
    guesses = np.zeros(len(scores), dtype=bool)
    for part in (0, 1):
        known, rows = fold != part, fold == part
        if len(np.unique(is_member[known])) == 2:
            guesses[rows] = scores[rows] >= choose_threshold(scores[known], is_member[known])
    return guesses


def choose_threshold(scores: np.ndarray, is_member: np.ndarray) -> float:
    """Return the threshold of the largest balanced accuracy, halfway between two scores."""
    values = np.unique(scores)
    members, others = np.sort(scores[is_member]), np.sort(scores[~is_member])
    above = 1 - np.searchsorted(members, values) / len(members)
    below = np.searchsorted(others, values) / len(others)
    best = int(np.argmax(above + below))
    return float(values[best] if best == 0 else (values[best - 1] + values[best]) / 2)
