"""Membership inference from the losses of single examples: loss threshold and RMIA.

Lower bound on epsilon from one run with canaries: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846).
"""

import math
from dataclasses import dataclass

import numpy as np

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


SHARES = (0.1, 0.25, 0.5, 1.0)
"""Shares of the canaries on which the attacker guesses; the confidence is divided among them."""
LEVEL = 0.95


@dataclass(frozen=True)
class CanaryBound:
    """What the attacker's guesses prove.

    Attributes:
        epsilon: lower bound on epsilon at 95 %.
        canaries: number of canaries, each included with probability 1/2.
        guesses: number of canaries that the attacker called included or excluded.
        correct: number of correct guesses.
    """

    epsilon: float
    canaries: int
    guesses: int
    correct: int


def compute_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the probability of at least ``correct`` correct guesses if the run is (epsilon, delta)-private.

    arXiv:2305.08846, theorem 5.2 and the program in appendix D.
    """
    from scipy.stats import binom

    accuracy = 1 / (1 + math.exp(-epsilon))
    beta = float(binom.sf(correct - 1, guesses, accuracy))
    # Largest mean probability of the counts just below ``correct``, which delta may shift upwards.
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    alpha = float((below / np.arange(1, correct + 1)).max()) if correct else 0.0
    return min(beta + 2 * alpha * delta * canaries, 1.0)


def compute_epsilon_bound(canaries: int, guesses: int, correct: int, delta: float, level: float = LEVEL) -> float:
    """Return the largest epsilon that the guesses contradict at this level; 0 if they contradict none.

    Args:
        canaries: number of canaries, each included independently with probability 1/2.
        guesses: number of guesses, fixed beforehand.
        correct: number of correct guesses.
        delta: delta of the claim.
        level: confidence.
    """
    if compute_p_value(canaries, guesses, correct, 0.0, delta) >= 1 - level:
        return 0.0
    low, high = 0.0, 1.0
    while compute_p_value(canaries, guesses, correct, high, delta) < 1 - level:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if compute_p_value(canaries, guesses, correct, middle, delta) < 1 - level:
            low = middle
        else:
            high = middle
    return low


def bound_epsilon(scores: np.ndarray, is_included: np.ndarray, delta: float) -> CanaryBound:
    """Return the best bound of an attacker who calls the highest scores included and the lowest ones excluded.

    The attacker tries each of :data:`SHARES`, so that each gets its part of the error probability (Bonferroni).

    Args:
        scores: ``(m,)``; higher: rather included.
        is_included: ``(m,)`` bool, drawn independently with probability 1/2.
        delta: delta of the claim.
    """
    count, order = len(scores), np.argsort(-scores, kind="stable")
    level = 1 - (1 - LEVEL) / len(SHARES)
    bounds = []
    for share in SHARES:
        half = max(int(share * count) // 2, 1) if count > 1 else 0
        if not half:
            continue
        correct = int(is_included[order[:half]].sum() + (~is_included[order[-half:]]).sum())
        epsilon = compute_epsilon_bound(count, 2 * half, correct, delta, level)
        bounds.append(CanaryBound(epsilon, count, 2 * half, correct))
    return max(bounds, key=lambda bound: bound.epsilon, default=CanaryBound(0.0, count, 0, 0))
