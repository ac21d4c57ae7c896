"""Site means and linear models: equal to scikit-learn's own on standardised rows, and usable at every site."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from flare_sparse.results.runs.baselines import (
    PENALTIES,
    BaselineData,
    SiteRows,
    fit_baselines,
    label_rows,
    number_labels,
    stack_rows,
)
from flare_sparse.tasks.task import Kind

NONE = BaselineData(np.zeros((0, 1)), np.zeros((0, 1)), np.zeros(0))


def build_site(seed: int, kind: Kind, train: int = 60, validation: int = 20, test: int = 30) -> SiteRows:
    """Return a site whose targets depend on three of six features; the last feature is constant."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(train + validation + test, 6)) * [1, 10, 0.1, 1, 1, 0] + 5
    signal = (x[:, :3] - 5) @ [1.0, -0.1, 10.0] + seed + 0.3 * draw.normal(size=len(x))
    y = signal if kind == "regression" else (signal > seed).astype(float)
    if kind == "classes":
        y = np.digitize(signal, [seed - 1, seed + 1]).astype(float)
    parts = np.split(np.arange(len(x)), [train, train + validation])
    return SiteRows(*(label_rows(str(seed), x[rows], y[rows, None]) if len(rows) else NONE for rows in parts))


def test_pooled_ridge_equals_the_best_of_scikit_learn_on_validation_examples() -> None:
    sites = {name: build_site(seed, "regression") for seed, name in enumerate("abc")}
    x, y = (np.vstack([getattr(site.train, part) for site in sites.values()]) for part in "xy")
    held_x, held_y = (np.vstack([getattr(site.validation, part) for site in sites.values()]) for part in "xy")
    models = [make_pipeline(StandardScaler(), Ridge(alpha=penalty)).fit(x, y[:, 0]) for penalty in PENALTIES]
    best = min(models, key=lambda model: np.abs(model.predict(held_x) - held_y[:, 0]).sum())
    expected = np.concatenate([best.predict(site.test.x) for site in sites.values()])
    results = fit_baselines("regression", sites)
    assert list(results) == ["site_mean", "ridge_local", "ridge_pooled"]
    assert results["ridge_pooled"][:, 0] == pytest.approx(expected)
    means = np.repeat([site.train.y.mean() for site in sites.values()], 30)
    assert results["site_mean"][:, 0] == pytest.approx(means)


def test_missing_features_become_the_means_of_the_training_rows() -> None:
    """They equal the same rows with the means in place: of each site for its own model, of all sites for the pooled."""
    draw = np.random.default_rng(0)
    sites = {name: build_site(seed, "regression", validation=0) for seed, name in enumerate("ab")}
    for site in sites.values():
        for part in (site.train, site.test):
            part.x[draw.random(part.x.shape) < 0.2] = np.nan
            part.x[:, 4] = np.nan
    results = fit_baselines("regression", sites)

    def predict(train: list[SiteRows], penalty: float) -> np.ndarray:
        x, y = (np.vstack([getattr(site.train, part) for site in train]) for part in "xy")
        model = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler(), Ridge(alpha=penalty))
        model.fit(x, y[:, 0])
        return np.concatenate([model.predict(site.test.x) for site in train])

    local = [np.concatenate([predict([site], penalty) for site in sites.values()]) for penalty in PENALTIES]
    assert min(np.abs(results["ridge_local"][:, 0] - values).max() for values in local) < 1e-9
    pooled = [predict([*sites.values()], penalty) for penalty in PENALTIES]
    assert min(np.abs(results["ridge_pooled"][:, 0] - values).max() for values in pooled) < 1e-9


def test_local_models_share_the_penalty_with_the_smallest_loss_over_all_sites() -> None:
    sites = {name: build_site(seed, "regression", train=12) for seed, name in enumerate("ab")}
    local = fit_baselines("regression", sites)["ridge_local"][:, 0]

    def fit(site: SiteRows, penalty: float) -> Any:
        return make_pipeline(StandardScaler(), Ridge(alpha=penalty)).fit(site.train.x, site.train.y[:, 0])

    losses = [
        sum(np.abs(fit(s, p).predict(s.validation.x) - s.validation.y[:, 0]).sum() for s in sites.values())
        for p in PENALTIES
    ]
    best = PENALTIES[int(np.argmin(losses))]
    expected = [fit(site, best).predict(site.test.x) for site in sites.values()]
    assert local == pytest.approx(np.concatenate(expected))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "columns"), [("binary", 1), ("classes", 3)])
def test_classifiers_return_probabilities_better_than_the_prevalence(kind: Kind, columns: int) -> None:
    sites = {name: build_site(seed, kind) for seed, name in enumerate("ab")}
    results = fit_baselines(kind, sites)
    assert list(results) == ["site_mean", "logistic_local", "logistic_pooled"]
    assert {values.shape for values in results.values()} == {(60, columns)}
    targets = np.vstack([site.test.y for site in sites.values()])[:, 0]

    def hit(values: np.ndarray) -> float:
        classes = values[:, 0] > 0.5 if columns == 1 else values.argmax(axis=1)
        return float((classes == targets).mean())

    assert hit(results["logistic_local"]) > 0.8 > hit(results["site_mean"])
    if columns > 1:
        assert results["site_mean"].sum(axis=1) == pytest.approx(np.ones(60))


def test_pooled_logistic_regression_equals_that_of_scikit_learn() -> None:
    site = build_site(1, "binary")
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1 / PENALTIES[0], max_iter=2000))
    values = {
        penalty: make_pipeline(StandardScaler(), LogisticRegression(C=1 / penalty, max_iter=2000))
        .fit(site.train.x, site.train.y[:, 0])
        .predict_proba(site.test.x)[:, 1]
        for penalty in PENALTIES
    }
    result = fit_baselines("binary", {"a": site})["logistic_pooled"][:, 0]
    assert min(np.abs(result - expected).max() for expected in values.values()) < 1e-6
    assert model is not None


@pytest.mark.slow
def test_sites_of_one_class_without_training_or_without_test_examples_are_predicted_or_left_out() -> None:
    full = build_site(1, "binary")
    one_class = SiteRows(
        label_rows("", full.train.x[:5], np.zeros((5, 1))), NONE, label_rows("", full.test.x[:2], full.test.y[:2])
    )
    untrained = SiteRows(NONE, NONE, label_rows("", full.test.x[:3], full.test.y[:3]))
    untested = SiteRows(full.train, NONE, NONE)
    results = fit_baselines("binary", {"a": one_class, "b": untrained, "c": untested, "d": full})
    assert {len(values) for values in results.values()} == {2 + 3 + 30}
    assert results["site_mean"][:2, 0].tolist() == [0, 0]
    assert results["logistic_local"][:2, 0].tolist() == [0, 0]
    pooled = np.vstack([one_class.train.y, full.train.y, full.train.y]).mean()
    assert results["site_mean"][2:5, 0] == pytest.approx([pooled] * 3)


def test_penalty_is_chosen_by_cross_validation_without_validation_examples() -> None:
    """Ten noisy rows of fifty features: the largest penalties win."""
    draw = np.random.default_rng(0)
    train, test = (label_rows("", draw.normal(size=(n, 50)), draw.normal(size=(n, 1))) for n in (10, 40))
    results = fit_baselines("regression", {"a": SiteRows(train, NONE, test)})
    assert results["ridge_local"].std() < 0.1 * train.y.std()


def test_cross_validation_holds_out_all_rows_of_a_subject() -> None:
    """Rows of a subject share features and a target of their own: across folds, the least penalty recalls them."""
    draw = np.random.default_rng(0)
    subjects = np.repeat(np.arange(12), 10)
    x, y = draw.normal(size=(12, 30))[subjects], draw.normal(size=(12, 1))[subjects]
    x = x + 1e-3 * draw.normal(size=x.shape)
    test = label_rows("", draw.normal(size=(40, 30)), draw.normal(size=(40, 1)))
    by_subject = fit_baselines("regression", {"a": SiteRows(BaselineData(x, y, subjects), NONE, test)})
    by_row = fit_baselines("regression", {"a": SiteRows(label_rows("", x, y), NONE, test)})
    for name in ("ridge_local", "ridge_pooled"):
        assert by_subject[name].std() < 0.1 * by_row[name].std()


def test_rows_of_several_sites_keep_their_subjects() -> None:
    parts = [
        BaselineData(np.zeros((3, 1)), np.zeros((3, 1)), np.array(names))
        for names in (["a 5", "a 2", "a 5"], ["b 2"] * 3)
    ]
    assert number_labels(stack_rows([*parts, NONE]).subjects.tolist()).tolist() == [0, 1, 0, 2, 2, 2]
    assert len(stack_rows([NONE, NONE]).subjects) == 0


def test_penalty_of_the_hazard_is_not_the_worst_one_where_a_subject_is_far_from_all_others() -> None:
    """A column that is nearly constant, as an enzyme with rare huge values: its coefficient is noise, times 40,000."""
    draw = np.random.default_rng(0)
    x = np.c_[draw.normal(size=(60, 3)), 1 + 1e-3 * draw.normal(size=60)]
    x[draw.integers(60), 3] = 50.0
    times, events = draw.exponential(np.exp(-x[:, 0])), (draw.random(60) < 0.7).astype(float)
    train = label_rows("", x, np.c_[times, events])
    new = draw.normal(size=(200, 3))
    test = label_rows("", np.c_[new, np.ones(200)], np.c_[draw.exponential(np.exp(-new[:, 0])), np.ones(200)])
    found = fit_baselines("survival", {"a": SiteRows(train, NONE, test)})["cox_pooled"][:, 0]
    assert np.corrcoef(found, new[:, 0])[0, 1] > 0.5
