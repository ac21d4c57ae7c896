"""Attribution: which site an example comes from, compared with chance.

Membership inference between sites: each site trains a classifier of gradient features and attacks each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..runs.bootstrap import iterate_resamples
from .result import Ranking, compute_interval

FOLDS = 5


@dataclass(frozen=True)
class Attribution:
    """Accuracy of a classifier of sites.

    Attributes:
        accuracy: mean over the sites of the share of their examples that are attributed to them.
        chance: that of a guess, ``1 / sites``.
        interval: 95 % bootstrap interval of the accuracy.
        sites: number of sites.
    """

    accuracy: float
    chance: float
    interval: tuple[float, float] | None
    sites: int


def attribute_examples(features: np.ndarray, sites: np.ndarray, resamples: int, seed: int) -> Attribution | None:
    """Return how well features tell the sites of examples, cross-validated; None for fewer than two sites.

    Args:
        features: ``(n, d)`` of each example.
        sites: ``(n,)`` site of each example; sites with fewer than :data:`FOLDS` examples are left out.
        resamples: number of bootstrap resamples; 0: no interval.
        seed: seed of the folds.
    """
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    names, counts = np.unique(sites, return_counts=True)
    usable = np.isin(sites, names[counts >= FOLDS])
    features, sites = features[usable], sites[usable]
    if len(np.unique(sites)) < 2:
        return None
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed % 2**32)
    return measure_attribution(cross_val_predict(build_classifier(), features, sites, cv=folds), sites, resamples)


def measure_attribution(guesses: np.ndarray, sites: np.ndarray, resamples: int) -> Attribution:
    """Return the accuracy of guessed sites ``(n,)`` against the true ones ``(n,)``."""
    names = np.unique(sites)
    hits = (guesses == sites).astype(np.float64)

    def compute(weights: np.ndarray) -> np.ndarray:
        shares = [weights[:, sites == name] @ hits[sites == name] / weights[:, sites == name].sum(1) for name in names]
        return np.asarray(np.mean(shares, axis=0))

    accuracy = float(compute(np.ones((1, len(sites)), dtype=np.int64))[0])
    drawn = [compute(weights) for weights in iterate_resamples(sites, resamples)]
    interval = compute_interval(np.concatenate(drawn)) if drawn else None
    return Attribution(accuracy, 1 / len(names), interval, len(names))


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
