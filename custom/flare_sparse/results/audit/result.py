"""Figures of an attack: AUC, accuracy and true positives at few false alarms, with bootstrap intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.errors import DataError
from ...core.ranking import Statistic, build_auc
from ..runs.bootstrap import LEVEL, iterate_resamples

LOW_RATES = {"tpr_at_1_percent_fpr": 0.01, "tpr_at_0_1_percent_fpr": 0.001}
"""Shares of non-members that an attacker may accuse wrongly, by the name of the figure."""
FIGURES = ("auc", "balanced_accuracy", *LOW_RATES)
"""Figures of every attack that tells members from non-members."""


@dataclass(frozen=True)
class AttackResult:
    """What one attack achieved.

    Attributes:
        attacker: ``outsider``, ``member`` or ``server``.
        attack: name of the attack.
        figures: :data:`FIGURES` by name; None: the attack has no such figure.
        intervals: lower and upper bound of the 95 % bootstrap interval, by figure.
        details: further figures of this attack.
        notes: what limits the figures.
    """

    attacker: str
    attack: str
    figures: Mapping[str, float | None] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return one flat record; ``interval`` is that of the AUC."""
        return {
            "attacker": self.attacker,
            "attack": self.attack,
            **{name: self.figures.get(name) for name in FIGURES},
            "interval": list(self.intervals["auc"]) if "auc" in self.intervals else None,
            "intervals": {name: list(bounds) for name, bounds in self.intervals.items()},
            **self.details,
            "notes": list(self.notes),
        }


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
    rankings: Sequence[Ranking], is_member: np.ndarray, sites: np.ndarray, resamples: int
) -> tuple[dict[str, float | None], dict[str, tuple[float, float]]]:
    """Return the figures of an attack, means over its rankings, and their bootstrap intervals.

    Args:
        rankings: one for each model or pair of sites that is attacked.
        is_member: ``(n,)`` bool.
        sites: ``(n,)`` site of each example; members and non-members of a site are resampled separately.
        resamples: number of resamples; 0: no intervals.

    Raises:
        DataError: a score is not a number, or a ranking has no members or no non-members.
    """
    statistics: dict[str, list[Statistic]] = {name: [] for name in FIGURES}
    for ranking in rankings:
        labels = is_member[ranking.rows]
        if np.isnan(ranking.scores).any():
            raise DataError("a score of an attack is not a number; look for NaN in the model or the data of the run")
        if labels.all() or not labels.any():
            raise DataError("an attack needs members and non-members: training examples and test examples of a site")
        for name, statistic in _build_statistics(ranking, labels).items():
            statistics[name].append(_select_rows(statistic, ranking.rows))
    all_once = np.ones((1, len(is_member)), dtype=np.int64)
    figures: dict[str, float | None] = {
        name: float(np.mean([s(all_once)[0] for s in parts])) for name, parts in statistics.items()
    }
    if not resamples:
        return figures, {}
    strata = np.array([f"{site} {label}" for site, label in zip(sites, is_member, strict=True)])
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in statistics}
    for weights in iterate_resamples(strata, resamples):
        for name, parts in statistics.items():
            drawn[name].append(np.mean([s(weights) for s in parts], axis=0))
    return figures, {name: compute_interval(np.concatenate(values)) for name, values in drawn.items()}


def compute_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the percentile interval of a statistic's resamples."""
    low, high = np.nanquantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


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


def _build_statistics(ranking: Ranking, labels: np.ndarray) -> dict[str, Statistic]:
    statistics = {
        "auc": build_auc(ranking.scores, labels[:, None].astype(float)),
        "balanced_accuracy": build_balanced_accuracy(ranking.guesses, labels),
    }
    return statistics | {name: build_tpr(ranking.scores, labels, rate) for name, rate in LOW_RATES.items()}


def _select_rows(statistic: Statistic, rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda weights: statistic(weights[:, rows])
