"""Trivial baselines: the mean of each site, and linear models of each site alone and of all sites pooled.

A network that is worse than these has not learned what a hospital needs. They are fitted on the training examples that
the run had. The penalty is chosen on the validation examples, or without any by a five-fold cross-validation over the
training subjects; the models of single sites share one penalty, because a site is too small to choose its own.

Cox regression with a penalty: the linear baseline of survival times.

Equal to lifelines' CoxPHFitter (``tests/results/runs/test_cox.py``), which does not replace it: it has Efron's form for
tied times only, its Newton steps diverge where a table has more columns than subjects, and its likelihood of held-out
subjects is infinite where one is far from all others. scikit-survival has Breslow's form, under GPL-3.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...tasks.task import Kind


def compute_partial_loss(log_hazard: np.ndarray, times: np.ndarray, events: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the negative logarithm of Cox's partial likelihood, and its derivative by each hazard's logarithm.

    Cox (1972), J. R. Stat. Soc. B 34:187, with Breslow's form for tied times. All arrays are ``(n,)``.

    Returns:
        The loss, a sum over the events, and its gradient ``(n,)``.
    """
    order = np.argsort(-times, kind="stable")
    eta, event, time = log_hazard[order], events[order] > 0, times[order]
    # Equal times share a risk set: that of the last of them in descending order. Sums of hazards stay logarithms: where
    # one log-hazard is 800 below another, its hazard is 0 in float64, and its own risk set would be empty.
    last = np.searchsorted(-time, -time, side="right") - 1
    log_total = np.logaddexp.accumulate(eta)[last]
    loss = float(np.sum((log_total - eta)[event]))
    # A subject is at risk at its own time and at all earlier ones: those at its position and after it, ties included.
    log_inverse = np.logaddexp.accumulate(np.where(event, -log_total, -np.inf)[::-1])[::-1]
    first = np.searchsorted(-time, -time, side="left")
    gradient = np.zeros(len(eta))
    gradient[order] = np.exp(eta + log_inverse[first]) - event
    return loss, gradient


def fit_cox(x: np.ndarray, times: np.ndarray, events: np.ndarray, penalty: float) -> np.ndarray:
    """Return coefficients ``(d,)`` that minimise the partial loss plus ``penalty / 2`` times their squared norm.

    Args:
        x: standardised features ``(n, d)``.
        times: ``(n,)``.
        events: ``(n,)`` 1 for an event, else 0.
        penalty: strength of the penalty.
    """
    from scipy.optimize import minimize

    def compute(coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = compute_partial_loss(x @ coefficients, times, events)
        return loss + penalty / 2 * float(coefficients @ coefficients), x.T @ gradient + penalty * coefficients

    # The default limits leave an error of 1e-5.
    limits = {"ftol": 1e-12, "gtol": 1e-6}
    return np.asarray(minimize(compute, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options=limits).x)


PENALTIES = tuple(10.0**power for power in range(-1, 6))
"""Penalties of the squared norm of standardised coefficients to choose from."""
FOLDS = 5
NAMES: dict[Kind, str] = {"regression": "ridge", "binary": "logistic", "classes": "logistic", "survival": "cox"}
"""Name of the linear model by kind of the targets."""
Predict = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class BaselineData:
    """Rows of examples.

    Attributes:
        x: features ``(n, d)``; NaN where one is missing.
        y: targets: numbers or classes from 0 ``(n, 1)``, or times and events ``(n, 2)``.
        subjects: ``(n,)`` label of each row's subject, which no other site has.
    """

    x: np.ndarray
    y: np.ndarray
    subjects: np.ndarray

    def take(self, rows: np.ndarray) -> BaselineData:
        """Return some of the rows."""
        return BaselineData(self.x[rows], self.y[rows], self.subjects[rows])


def number_labels(labels: Iterable[Hashable]) -> np.ndarray:
    """Return the number ``(n,)`` of each label, from 0 in the order in which they occur.

    >>> number_labels(["b", "a", "b"])
    array([0, 1, 0])
    """
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)


def label_rows(site: str, x: np.ndarray, y: np.ndarray, subjects: Sequence[object] = ()) -> BaselineData:
    """Return the rows of a site whose subjects have these names; without names, every row is a subject of its own."""
    return BaselineData(x, y, np.array([f"{site} {subject}" for subject in subjects or range(len(x))]))


@dataclass(frozen=True)
class SiteRows:
    """The examples of one site as rows."""

    train: BaselineData
    validation: BaselineData
    test: BaselineData


def fit_baselines(kind: Kind, sites: Mapping[str, SiteRows]) -> dict[str, np.ndarray]:
    """Return the predictions of each baseline for the test examples of all sites, in the order of ``sites``.

    Predictions are numbers ``(n, 1)``, the probability of class 1 ``(n, 1)``, probabilities ``(n, classes)``, or the
    logarithm of a relative hazard ``(n, 1)``, of which the mean is 0 everywhere.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    model = _Linear(kind, _count_classes(kind, sites.values()))
    pooled = stack_rows([site.train for site in sites.values()])
    name = NAMES[kind]
    strength = _choose_penalty(model, {"all": (pooled, stack_rows([site.validation for site in sites.values()]))})
    shared = model.fit(pooled, strength)
    strength = _choose_penalty(model, {key: (site.train, site.validation) for key, site in sites.items()})
    results: dict[str, list[np.ndarray]] = {"site_mean": [], f"{name}_local": [], f"{name}_pooled": []}
    for site in sites.values():
        if not len(site.test.x):
            continue
        # A site without training examples of its own has nothing but the others' mean.
        source = site.train if len(site.train.x) else pooled
        results["site_mean"].append(model.fit_mean(source)(site.test.x))
        results[f"{name}_local"].append(model.fit(source, strength)(site.test.x))
        results[f"{name}_pooled"].append(shared(site.test.x))
    return {baseline: np.concatenate(parts) for baseline, parts in results.items()}


class _Linear:
    """Ridge, logistic or Cox regression on standardised features.

    Args:
        kind: kind of the targets.
        classes: number of classes; 0 for other targets.
    """

    def __init__(self, kind: Kind, classes: int):
        self.kind, self.classes = kind, classes

    def fit_mean(self, data: BaselineData) -> Predict:
        """Return the predictor of the mean, or of the shares of the classes."""
        if self.kind == "survival":
            mean = np.zeros(1)
        elif self.kind == "regression":
            mean = data.y.mean(axis=0)
        else:
            shares = np.bincount(data.y[:, 0].astype(int), minlength=self.classes) / len(data.y)
            mean = shares[1:] if self.kind == "binary" else shares
        return lambda x: np.tile(mean, (len(x), 1))

    def fit(self, data: BaselineData, penalty: float) -> Predict:
        """Return the predictor of a linear model; that of the mean where there is nothing to fit.

        A missing feature becomes the mean of the training examples that have it.
        """
        present = ~np.isnan(data.x)
        means = np.where(present, data.x, 0.0).sum(axis=0) / present.sum(axis=0).clip(min=1)

        def impute(x: np.ndarray) -> np.ndarray:
            missing = np.isnan(x)
            # Voxels are never missing, and a copy of theirs would be large.
            return np.where(missing, means, x) if missing.any() else x

        train = impute(data.x)
        scale = train.std(axis=0) if len(train) else np.zeros(train.shape[1])
        # Voxels outside the brain and constant columns carry nothing, and would divide by zero. Each column is measured
        # by its own values: a thickness in mm varies a million times less than a volume in mm3.
        varying = scale > 1e-6 * np.abs(train).max(axis=0, initial=1e-30)
        # Without an event, a partial likelihood has no minimum.
        targets = data.y[:, -1]
        if len(np.unique(data.y)) < 2 or not varying.any() or (self.kind == "survival" and not targets.any()):
            return self.fit_mean(data)
        mean, scale = train[:, varying].mean(axis=0), scale[varying]

        def standardize(x: np.ndarray) -> np.ndarray:
            return np.asarray((impute(x)[:, varying] - mean) / scale)

        if self.kind == "survival":
            coefficients = fit_cox(standardize(data.x), data.y[:, 0], targets, penalty)
            return lambda x: (standardize(x) @ coefficients)[:, None]
        # Only a report needs scikit-learn, which takes a second to import.
        from sklearn.linear_model import LogisticRegression, Ridge

        if self.kind == "regression":
            ridge = Ridge(alpha=penalty).fit(standardize(data.x), targets)
            return lambda x: np.asarray(ridge.predict(standardize(x))).reshape(-1, 1)
        logistic = LogisticRegression(C=1 / penalty, max_iter=2000).fit(standardize(data.x), targets.astype(int))

        def predict(x: np.ndarray) -> np.ndarray:
            # Classes that the training examples lack keep probability 0.
            probabilities = np.zeros((len(x), self.classes))
            probabilities[:, logistic.classes_] = logistic.predict_proba(standardize(x))
            return probabilities[:, 1:] if self.kind == "binary" else probabilities

        return predict

    def compute_loss(self, predictions: np.ndarray, y: np.ndarray) -> float:
        """Return the sum of absolute errors, of the logarithmic losses, or the negative partial log-likelihood."""
        if self.kind == "survival":
            return compute_partial_loss(predictions[:, 0], y[:, 0], y[:, 1])[0]
        if self.kind == "regression":
            return float(np.abs(predictions - y).sum())
        classes = y[:, 0].astype(int)
        if self.kind == "binary":
            predictions = np.hstack([1 - predictions, predictions])
        return float(-np.log(np.maximum(predictions[np.arange(len(y)), classes], 1e-6)).sum())


def _choose_penalty(model: _Linear, sets: Mapping[str, tuple[BaselineData, BaselineData]]) -> float:
    """Return the penalty with the smallest loss over all pairs of training and validation examples."""
    if any(len(validation.x) for _, validation in sets.values()):
        pairs = [(train, validation) for train, validation in sets.values() if len(validation.x) and len(train.x)]
    else:
        pairs = [pair for train, _ in sets.values() for pair in _iterate_folds(train)]
    losses = [
        sum(model.compute_loss(model.fit(train, penalty)(held_out.x), held_out.y) for train, held_out in pairs)
        for penalty in PENALTIES
    ]
    # NaN would be the smallest loss.
    return PENALTIES[int(np.argmin(np.nan_to_num(losses, nan=np.inf, posinf=np.inf)))]


def _iterate_folds(data: BaselineData) -> Iterable[tuple[BaselineData, BaselineData]]:
    """Yield training and held-out rows, all rows of a subject together; the rows are in the order of the split."""
    subjects = number_labels(data.subjects.tolist())
    count = subjects.max(initial=-1) + 1
    for fold in range(min(FOLDS, count) if count > 1 else 0):
        is_held_out = subjects % FOLDS == fold
        yield data.take(~is_held_out), data.take(is_held_out)


def stack_rows(parts: Iterable[BaselineData]) -> BaselineData:
    """Return the rows of several sites as one table."""
    # Without rows the number of columns is not known.
    filled = [part for part in parts if len(part.x)] or [BaselineData(np.zeros((0, 1)), np.zeros((0, 1)), np.zeros(0))]
    return BaselineData(*(np.concatenate([getattr(part, name) for part in filled]) for name in ("x", "y", "subjects")))


def _count_classes(kind: Kind, sites: Iterable[SiteRows]) -> int:
    if kind in ("regression", "survival"):
        return 0
    targets = [part.y for site in sites for part in (site.train, site.validation, site.test) if len(part.y)]
    return max(2, int(max(y.max() for y in targets)) + 1)
