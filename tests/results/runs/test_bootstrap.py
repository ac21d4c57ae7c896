"""Paired bootstrap: values, intervals and verdicts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import load_script
from sklearn.metrics import roc_auc_score
from thoroughness import count_cases

from flare_sparse.core.ranking import build_auc
from flare_sparse.results.runs.bootstrap import (
    ACCURACY,
    AUC,
    C_INDEX,
    C_INDEX_WITHIN_SITES,
    MAE,
    PairedMetric,
    build_c_index,
    compare_predictors,
    compute_c_index_influences,
    compute_r2_within_sites,
    iterate_resamples,
    select_metrics,
)

SITES = np.array(["a"] * 30 + ["b"] * 20)
compare_scores = load_script("experiments/runs").compare_scores


def draw(seed: int, count: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count)


def stretch(freedom: int) -> float:
    """Return by how much the interval of a mean is wider with an estimated variance than with a known one."""
    return float(scipy.stats.t.ppf(0.975, freedom) / scipy.stats.norm.ppf(0.975))


def test_interval_of_a_mean_is_that_of_the_formula_within_sites() -> None:
    first, second = draw(1) + 1.0, draw(2)
    result = compare_scores(first, second, SITES, is_lower_better=True)
    change = first - second
    assert result.value == pytest.approx(change.mean())
    # A resample keeps the sites' sizes, so only the variance within sites counts.
    variance = sum(change[site == SITES].var(ddof=1) * (site == SITES).sum() for site in ("a", "b")) / 50**2
    assert (result.high - result.low) / 2 == pytest.approx(1.96 * np.sqrt(variance), rel=0.05)
    assert result.by_site == {
        site: pytest.approx(change[site == SITES].mean()) for site in ("a", "b")
    }  # fmt: skip


@pytest.mark.parametrize(("sites", "per"), [(200, 2), (300, 1)])
def test_interval_is_unbiased_with_one_or_two_subjects_at_a_site(sites: int, per: int) -> None:
    """Drawing both subjects of a site would make the interval 0.7 times as wide; one alone would have none at all."""
    names, change = np.repeat(np.arange(sites), per), draw(8, sites * per)
    result = compare_scores(change, np.zeros_like(change), names, is_lower_better=True)
    strata = names if per > 1 else np.zeros_like(names)
    spread = [change[strata == stratum].var(ddof=1) * (strata == stratum).sum() for stratum in np.unique(strata)]
    assert (result.high - result.low) / 2 == pytest.approx(1.96 * np.sqrt(sum(spread)) / len(change), rel=0.05)


def test_single_subject_is_resampled_with_the_smallest_other_site_and_alone_decides_nothing() -> None:
    change = np.array([5.0, 1.0, 3.0, 0.0, 0.0, 0.0])
    result = compare_scores(change, np.zeros(6), np.array([*"abbccc"]), is_lower_better=True)
    # Two of 5, 1 and 3 are drawn, each with the weight 3 / 2.
    # Their quantiles 3 / 6 and 15 / 6 are stretched by t / z = 2.776 / 1.960 for six subjects of two strata.
    bounds = [9 / 6 - stretch(4), 9 / 6 + stretch(4)]
    assert [result.low, result.high] == pytest.approx(bounds, abs=2e-3)
    assert result.by_site == {"a": 5, "b": 2, "c": 0}
    for count, verdict in ((1, "undecided"), (5, "undecided"), (6, "behind")):
        few = compare_scores(np.ones(count), np.zeros(count), np.array(["a"] * count), is_lower_better=True)
        assert (few.value, few.verdict) == (1, verdict)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sites", "per", "expected"), [(3, 2, 0.0), (1, 6, 0.05), (5, 2, 0.05), (1, 10, 0.05), (3, 10, 0.05)]
)
def test_equal_predictors_are_called_different_in_one_case_of_twenty(sites: int, per: int, expected: float) -> None:
    """The type I error for normal differences; with three sites of two, every difference is undecided."""
    names, changes = np.repeat(np.arange(sites), per), draw(5, 600 * sites * per).reshape(600, -1)
    zeros = np.zeros(sites * per)
    verdicts = [compare_scores(change, zeros, names, is_lower_better=True, resamples=500).verdict for change in changes]
    # Three standard deviations of a share of 600.
    assert np.mean([verdict != "undecided" for verdict in verdicts]) == pytest.approx(expected, abs=0.027)


def test_equal_predictors_are_undecided_and_a_constant_gain_is_ahead() -> None:
    error = np.abs(draw(3))
    same = compare_scores(error, error, SITES, is_lower_better=True)
    assert (same.value, same.low, same.high, same.verdict, same.sites_that_gain) == (0, 0, 0, "undecided", 0)
    better = compare_scores(error - 0.5, error, SITES, is_lower_better=True)
    assert (better.verdict, better.sites_that_gain) == ("ahead", 1)
    assert (better.low, better.high) == (pytest.approx(-0.5), pytest.approx(-0.5))
    assert compare_scores(error - 0.5, error, SITES, is_lower_better=False).verdict == "behind"


def test_worst_site_and_share_of_sites_that_gain_follow_the_direction_of_the_metric() -> None:
    change = np.where(SITES == "a", -1.0, 2.0)
    lower = compare_scores(change, np.zeros(50), SITES, is_lower_better=True)
    assert (lower.worst_site, lower.sites_that_gain) == ("b", 0.5)
    assert compare_scores(change, np.zeros(50), SITES, is_lower_better=False).worst_site == "a"


@settings(max_examples=count_cases(20))
@given(seed=st.integers(0, 2**32 - 1), decimals=st.integers(0, 2))
def test_weighted_auc_equals_that_of_scikit_learn(seed: int, decimals: int) -> None:
    """Rounded risks have ties."""
    classes = (draw(seed) > 0).astype(float)[:, None]
    weights = np.random.default_rng(seed).integers(0, 4, size=(3, 50))
    weights[:, classes[:, 0].argmax()] += 1
    weights[:, classes[:, 0].argmin()] += 1
    risk = np.round(draw(seed + 1) + classes[:, 0], decimals)
    values = build_auc(risk, classes)(weights)
    if len(np.unique(classes)) < 2:
        assert np.isnan(values).all()
        return
    assert values == pytest.approx([roc_auc_score(classes, risk, sample_weight=row) for row in weights])


@pytest.mark.slow
def test_interval_of_an_auc_equals_one_computed_resample_by_resample() -> None:
    classes = (np.arange(50) % 3 == 0).astype(float)[:, None]
    first, second = draw(5) + classes[:, 0], draw(6)
    result = compare_predictors(AUC, first, second, classes, SITES, np.arange(50), resamples=300)
    slow, counts = [], np.concatenate(list(iterate_resamples(SITES, 300, left_out=1)))
    for weights in counts * np.where(SITES == "a", 30 / 29, 20 / 19):
        values = [roc_auc_score(classes, risk, sample_weight=weights) for risk in (first, second)]
        slow.append(values[0] - values[1])
    assert result is not None
    bounds = result.value + stretch(48) * (np.quantile(slow, [0.025, 0.975]) - result.value)
    assert (result.low, result.high) == pytest.approx(tuple(bounds), rel=1e-4)
    of_a = SITES == "a"
    assert result.by_site["a"] == pytest.approx(
        roc_auc_score(classes[of_a], first[of_a]) - roc_auc_score(classes[of_a], second[of_a])
    )


def test_c_index_counts_the_pairs_of_harrell() -> None:
    targets = np.array([[1.0, 1], [2.0, 0], [3.0, 1], [3.0, 0], [2.0, 1]])
    risk = np.array([2.0, 0, 1, 1, 2])
    pairs = [(i, j) for i, j in product(range(5), repeat=2) if targets[i, 1] and targets[i, 0] < targets[j, 0]]
    pairs += [(4, 1), (2, 3)]  # Censored at the time of the other one's event.
    expected = np.mean([1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0 for i, j in pairs])
    statistic = build_c_index(risk, targets, np.zeros(5))
    assert statistic(np.ones((1, 5))) == pytest.approx([expected])
    assert np.isnan(statistic(np.array([[0, 1, 0, 1, 0]]))).all(), "two subjects without events"
    doubled = np.array([[2, 1, 1, 1, 1]])
    again = np.repeat(np.arange(5), doubled[0])
    assert statistic(doubled) == pytest.approx(build_c_index(risk[again], targets[again], np.zeros(6))(np.ones((1, 6))))


def test_metric_of_each_kind_scores_subjects() -> None:
    probabilities, classes = np.array([[0.1, 0.9], [0.6, 0.4]]), np.array([[1.0], [1.0]])
    assert ACCURACY.score(probabilities, classes).tolist() == [1, 0]
    assert ACCURACY.score(probabilities[:, 1:], classes).tolist() == [1, 0]
    sites, targets, subjects = np.array(["a", "a"]), np.array([[10.0], [20.0]]), np.arange(2)
    scores = MAE.score(targets + 1, targets), MAE.score(targets - 3, targets)
    result = compare_predictors(MAE, *scores, targets, sites, subjects)
    assert result is not None
    assert (result.first, result.second, result.high) == (1, 3, -2)
    risk = AUC.score(probabilities, classes)
    assert risk.tolist() == [0.9, 0.4]
    assert compare_predictors(AUC, risk, risk, classes, sites, subjects) is None, "one class has no AUC"


@pytest.mark.parametrize("metric", [MAE, AUC])
def test_examples_of_a_subject_are_drawn_together(metric: PairedMetric) -> None:
    """Eight copies of every example add no subject, and so do not narrow the interval."""
    classes = (np.arange(50) % 3 == 0).astype(float)[:, None]
    first, second = draw(5) + classes[:, 0], draw(6)
    once = compare_predictors(metric, first, second, classes, SITES, np.arange(50), resamples=500)
    copied = (np.repeat(part, 8, axis=0) for part in (first, second, classes, SITES, np.arange(50)))
    copies = compare_predictors(metric, *copied, resamples=500)
    assert once is not None
    assert copies is not None
    assert (copies.value, copies.low, copies.high) == pytest.approx((once.value, once.low, once.high))
    assert copies.by_site == pytest.approx(once.by_site)


def test_two_perfect_rankings_do_not_differ_by_rounding() -> None:
    classes = (np.arange(50) % 3 == 0).astype(float)[:, None]
    first, second = (np.abs(draw(seed)) * (2 * classes[:, 0] - 1) for seed in (5, 6))
    result = compare_predictors(AUC, first, second, classes, SITES, np.arange(50), resamples=500)
    assert result is not None
    assert (result.first, result.low, result.high, result.verdict) == (1, 0, 0, "undecided")


def test_subjects_count_alike_with_few_and_many_examples() -> None:
    subjects, scores = np.array([0, 1, 1, 1]), np.array([1.0, 3.0, 4.0, 5.0])
    zeros = np.zeros(4)
    result = compare_predictors(MAE, scores, zeros, zeros[:, None], np.array([*"aaaa"]), subjects)
    assert result is not None
    assert result.value == 2.5
    # Resamples of two subjects, 1 and 4, stretched alike on both sides.
    assert result.high - 2.5 == pytest.approx(2.5 - result.low)
    assert result.high > 4


def test_c_index_of_models_of_single_sites_compares_pairs_within_sites() -> None:
    """Both rank each site's subjects alike; only the first knows that the risk is higher at site b."""
    times = np.concatenate([np.arange(50, 80), np.arange(20)]).astype(float)
    targets = np.column_stack([times, np.ones(50)])
    local = np.where(SITES == "a", 99, 0) - times
    result = compare_predictors(C_INDEX_WITHIN_SITES, -times, local, targets, SITES, np.arange(50), resamples=500)
    assert result is not None
    assert (result.first, result.second, result.verdict) == (1, 1, "undecided")
    shifted = compare_predictors(C_INDEX, -times, local, targets, SITES, np.arange(50), resamples=500)
    assert shifted is not None
    assert shifted.verdict == "ahead"
    assert select_metrics("survival", has_site_models=True) == (C_INDEX_WITHIN_SITES,)
    assert select_metrics("survival", has_site_models=False) == (C_INDEX,)
    assert select_metrics("binary", has_site_models=True) == (ACCURACY, AUC)


@pytest.mark.parametrize("runs", [1, 3])
def test_influences_are_the_derivatives_of_the_c_index(runs: int) -> None:
    targets = np.column_stack([np.repeat(np.arange(1.0, 21.0), 2), np.arange(40) % 3 > 0])
    risk = np.random.default_rng(7).normal(size=(40, runs)).round(1)
    risk[np.arange(40) % 5 == 0, 0] = np.nan if runs > 1 else 0.0
    groups = np.arange(40) // 10 - 1
    statistic = build_c_index(risk, targets, groups)
    step = 2.0**-6
    derivatives = [
        (statistic(1 + step * unit[None]) - statistic(1 - step * unit[None])).item() / (2 * step) for unit in np.eye(40)
    ]
    influences = compute_c_index_influences(risk, targets, groups)
    assert influences == pytest.approx(np.array(derivatives), abs=1e-4)
    assert not influences[:10].any(), "their site is left out"
    assert influences.sum() == pytest.approx(0, abs=1e-12)


def test_pairs_within_sites_have_the_same_mean_in_resamples_as_in_the_estimate() -> None:
    """The first predictor is right at the sites of 4, the second at those of 12; sites of 2 are left out."""
    sizes = [2] * 10 + [4] * 20 + [12] * 4
    sites = np.repeat(np.arange(len(sizes)), sizes)
    place = np.concatenate([np.arange(size) for size in sizes])
    targets = np.column_stack([1.0 + place, np.ones(len(place))])
    sign = np.where(np.repeat(sizes, sizes) == 4, 1, -1)
    result = compare_predictors(
        C_INDEX_WITHIN_SITES, -sign * place, sign * place, targets, sites, np.arange(len(sites)), resamples=4000
    )
    assert result is not None
    small, large = 20 * 6, 4 * 66
    assert result.value == pytest.approx((small - large) / (small + large))
    assert (result.low + result.high) / 2 == pytest.approx(result.value, abs=0.02)
    assert set(result.by_site) == {str(site) for site in range(10, 34)}
    parts = (-sign * place, sign * place, targets, sites, np.arange(len(sites)))
    assert compare_predictors(C_INDEX_WITHIN_SITES, *(part[:20] for part in parts)) is None
    few = compare_predictors(C_INDEX_WITHIN_SITES, *(part[:24] for part in parts))
    assert few is not None
    assert (few.value, few.low, few.verdict) == (1, 1, "undecided"), "of 24 subjects four have pairs"


def test_metric_that_is_undefined_in_many_resamples_has_no_interval() -> None:
    classes, risk = np.eye(10)[0][:, None], draw(9, 10)
    few = compare_predictors(AUC, risk, -risk, classes, np.array(["a"] * 10), np.arange(10), resamples=500)
    assert few is None, "a third of the resamples has no case"
    both = np.vstack([classes, 1 - classes])
    assert compare_predictors(AUC, *[np.tile(risk, 2)] * 2, both, np.repeat(["a", "b"], 10), np.arange(20)) is not None


def test_c_index_of_several_runs_compares_pairs_within_each() -> None:
    """Two folds of models whose risks have another zero each; every model ranks perfectly."""
    times = np.arange(1.0, 21.0)
    targets, folds = np.column_stack([times, np.ones(20)]), np.arange(20) % 2
    risk = np.where(folds[:, None] == np.arange(2), -times[:, None] + [0, 1000], np.nan)
    statistic = build_c_index(risk, targets, np.zeros(20))
    assert statistic(np.ones((1, 20))) == 1
    risk[folds == 1, 1] *= -1
    assert build_c_index(risk, targets, np.zeros(20))(np.ones((1, 20))) == 0.5


def test_mean_of_each_site_explains_nothing_within_sites() -> None:
    targets = (draw(7) + np.where(SITES == "a", 0.0, 30.0))[:, None]
    means = np.array([targets[site == SITES].mean() for site in SITES])[:, None]
    assert compute_r2_within_sites(means, targets, SITES) == pytest.approx(0)
    assert compute_r2_within_sites(targets, targets, SITES) == 1
    assert compute_r2_within_sites(targets[:1], targets[:1], SITES[:1]) is None


def test_resample_draws_the_subjects_of_each_site_as_often_as_it_has_subjects() -> None:
    counts = np.concatenate(list(iterate_resamples(SITES, 1200)))
    assert counts.shape == (1200, 50)
    assert (counts[:, SITES == "a"].sum(axis=1) == 30).all()
    assert (counts[:, SITES == "b"].sum(axis=1) == 20).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(50), abs=0.15)
    # The variance of a binomial count with 30 or 20 draws: nearly 1.
    assert counts.var(axis=0).mean() == pytest.approx(1 - (30 / 30 + 20 / 20) / 50, rel=0.05)
    assert (counts[:500] != counts[500:1000]).any(), "chunks differ"
    fewer = np.concatenate(list(iterate_resamples(SITES, 600, left_out=1)))
    assert (fewer[:, SITES == "a"].sum(axis=1) == 29).all()
