"""Membership inference between sites: each site trains a classifier of gradient features and attacks each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .result import Ranking

SIGNIFICANCE = 0.05
"""Level of the one-sided test that a pair's accuracy exceeds 0.5."""


@dataclass(frozen=True)
class PairAttack:
    """One site's attack on another.

    Attributes:
        attacker: site whose own examples train the classifier.
        target: site whose training examples are looked for.
        ranking: scores and guesses for the target's examples.
        accuracy: balanced accuracy.
        p_value: probability of such guesses if they are independent of membership (Fisher's exact test, one-sided).
    """

    attacker: str
    target: str
    ranking: Ranking
    accuracy: float
    p_value: float

    @property
    def is_successful(self) -> bool:
        """Whether the accuracy exceeds 0.5 by the one-sided test."""
        return self.p_value < SIGNIFICANCE


def attack_between_sites(features: np.ndarray, is_member: np.ndarray, sites: np.ndarray) -> Iterator[PairAttack]:
    """Yield the attack of each site on each other site.

    Gupta et al. 2021 (arXiv:2105.02866), white-box attack, in the federated form of FedSparsify (arXiv:2208.11669,
    section "Measuring Privacy"): the attacker knows which of its own examples trained the model. Members and
    non-members weigh equally, so that 0.5 is the accuracy of a guess. Sites without both are left out.

    Args:
        features: ``(n, d)`` of each example.
        is_member: ``(n,)`` bool.
        sites: ``(n,)`` site of each example.
    """
    names = [site for site in np.unique(sites) if len(np.unique(is_member[sites == site])) == 2]
    for attacker in names:
        own = np.flatnonzero(sites == attacker)
        classifier = build_classifier().fit(features[own], is_member[own])
        for target in names:
            if target == attacker:
                continue
            rows = np.flatnonzero(sites == target)
            scores = classifier.decision_function(features[rows])
            yield _measure_pair(str(attacker), str(target), Ranking(rows, scores, scores > 0), is_member[rows])


def build_classifier() -> Any:
    """Return the attackers' classifier: logistic regression of standardised features, classes of equal weight."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # A small C: a site has fewer examples than features.
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.01, class_weight="balanced", max_iter=1000))


def _measure_pair(attacker: str, target: str, ranking: Ranking, is_member: np.ndarray) -> PairAttack:
    from scipy.stats import fisher_exact

    members, others = ranking.guesses[is_member], ranking.guesses[~is_member]
    table = [[int(members.sum()), int((~members).sum())], [int(others.sum()), int((~others).sum())]]
    p_value = float(fisher_exact(table, alternative="greater").pvalue)
    accuracy = (float(members.mean()) + float((~others).mean())) / 2
    return PairAttack(attacker, target, ranking, accuracy, p_value)
