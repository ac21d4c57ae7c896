"""Attribution: which site an example, or an update, comes from, compared with chance."""

from dataclasses import dataclass

import numpy as np

from ..runs.bootstrap import iterate_resamples
from .result import compute_interval

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

    from .pairs import build_classifier

    names, counts = np.unique(sites, return_counts=True)
    usable = np.isin(sites, names[counts >= FOLDS])
    features, sites = features[usable], sites[usable]
    if len(np.unique(sites)) < 2:
        return None
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed % 2**32)
    return measure_attribution(cross_val_predict(build_classifier(), features, sites, cv=folds), sites, resamples)


def attribute_updates(vectors: np.ndarray, sites: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Return the guessed site ``(n,)`` of each update: that whose other updates it points along most.

    What all sites have in common, the mean of a round, is subtracted before. A site's updates of other rounds are known
    to the attacker, as after a breach of one round's names.

    Args:
        vectors: ``(n, d)`` updates.
        sites: ``(n,)`` their sites.
        rounds: ``(n,)`` their rounds.
    """
    centred = vectors.astype(np.float64)
    for number in np.unique(rounds):
        centred[rounds == number] -= centred[rounds == number].mean(0)
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-30)
    names = np.unique(sites)
    guesses = []
    for vector, number in zip(centred, rounds, strict=True):
        others = rounds != number
        directions = [centred[others & (sites == name)].sum(0) for name in names]
        norms = [max(float(np.linalg.norm(direction)), 1e-30) for direction in directions]
        cosines = [vector @ direction / norm for direction, norm in zip(directions, norms, strict=True)]
        guesses.append(names[int(np.argmax(cosines))])
    return np.array(guesses)


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
