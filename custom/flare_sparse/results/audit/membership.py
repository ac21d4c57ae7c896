"""Membership inference from the losses of single examples: loss threshold and RMIA.

Between sites: each site trains a classifier of gradient features and attacks each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .result import Ranking

OFFLINE_SHIFT = 0.3
"""Parameter a of RMIA's estimate from models without the example alone (arXiv:2312.03262, section 3.3 and table 7)."""


def guess_below_mean(losses: np.ndarray, is_member: np.ndarray) -> np.ndarray:
    """Return guesses ``(n,)`` bool: a loss of at most the mean training loss is a member's.

    Yeom et al. 2018 (arXiv:1709.01604), adversary 2: the attacker knows the mean loss on the training examples.
    """
    return np.asarray(losses <= losses[is_member].mean())


def compute_rmia_scores(
    losses: np.ndarray, references: np.ndarray, is_in: np.ndarray, scale: float = 1.0
) -> np.ndarray:
    """Return RMIA's log likelihood ratios ``(n,)``, by which it ranks examples.

    Zarifzadeh et al. 2024 (arXiv:2312.03262), equations 3 and 4: an example's score is the share of a population whose
    likelihood ratios it exceeds by a factor. That share grows with the example's own ratio, which is returned: it ranks
    as the share does, and tells examples apart that exceed the whole of a small population. The ratio is
    ``p(x | model) / p(x)``, where ``p(x | model) = exp(-loss / scale)`` and ``p(x)`` is its mean over reference models
    that were trained with the example and over ones without it. An example without models of the first kind has the
    estimate ``p(x) = ((1 + a) p_out(x) + 1 - a) / 2``; one without those of the second kind, the mean over the first.

    Args:
        losses: ``(n,)`` losses under the attacked model.
        references: ``(k, n)`` losses under the reference models.
        is_in: ``(k, n)`` bool: trained with the example.
        scale: loss of one unit of log likelihood: 1 for cross entropies.
    """
    return np.asarray(-losses / scale - _estimate_log_prior(-references / scale, is_in))


def choose_scale(kind: str | None, references: np.ndarray) -> float:
    """Return the loss of one unit of log likelihood.

    The loss of a regression has the unit of its errors; its mean under the reference models is the maximum likelihood
    estimate of the scale of a Laplace distribution.
    """
    if kind in ("binary", "classes"):
        return 1.0
    mean = float(references.mean())
    return mean if np.isfinite(mean) and mean > 0 else 1.0


def _estimate_log_prior(log_likelihoods: np.ndarray, is_in: np.ndarray) -> np.ndarray:
    """Return log p(x) ``(n,)`` from the log likelihoods ``(k, n)`` under the reference models."""
    log_in, log_out = _compute_log_mean(log_likelihoods, is_in), _compute_log_mean(log_likelihoods, ~is_in)
    # Likelihoods of at most 1: a loss is not negative.
    offline = np.logaddexp(np.log((1 + OFFLINE_SHIFT) / 2) + log_out, np.log((1 - OFFLINE_SHIFT) / 2))
    online = np.logaddexp(log_in, log_out) - np.log(2)
    return np.where(~is_in.any(0), offline, np.where(is_in.all(0), log_in, online))


def _compute_log_mean(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the log of the mean of ``exp(values)`` over the chosen rows of each column; -inf without any."""
    total = np.logaddexp.reduce(np.where(chosen, values, -np.inf), axis=0)
    return np.asarray(total - np.log(np.maximum(chosen.sum(0), 1)))


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
    from scipy.stats import fisher_exact

    names = [site for site in np.unique(sites) if len(np.unique(is_member[sites == site])) == 2]
    for attacker in names:
        own = np.flatnonzero(sites == attacker)
        classifier = build_classifier().fit(features[own], is_member[own])
        for target in names:
            if target == attacker:
                continue
            rows = np.flatnonzero(sites == target)
            scores = classifier.decision_function(features[rows])
            members, others = (scores[is_member[rows] == label] > 0 for label in (True, False))
            table = [[int(guesses.sum()), int((~guesses).sum())] for guesses in (members, others)]
            p_value = float(fisher_exact(table, alternative="greater").pvalue)
            accuracy = (float(members.mean()) + float((~others).mean())) / 2
            yield PairAttack(str(attacker), str(target), Ranking(rows, scores, scores > 0), accuracy, p_value)


def build_classifier() -> Any:
    """Return the attackers' classifier: logistic regression of standardised features, classes of equal weight."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # A small C: a site has fewer examples than features.
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.01, class_weight="balanced", max_iter=1000))
