"""Metrics with noise: bounded by every subject, charged once for a model, within the budget of the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from flare_sparse.privacy.dp.account import Budget, BudgetSpent, PrivacyAccount
from flare_sparse.privacy.dp.accounting import Charge, compute_epsilon
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.metrics import MetricRelease

RUN, MODEL = "a" * 16, torch.linspace(-1, 1, 30)


def build_release(
    account: PrivacyAccount | None = None, bounds: dict[str, float] | None = None, **settings: float
) -> MetricRelease:
    config = PrivacyConfig.model_validate(
        {"metrics": "noised", "metric_bounds": bounds or {"mae": 20.0}, **(settings or {"noise_multiplier": 2.0})}
    )
    return MetricRelease(config, 4, account or PrivacyAccount(), RUN, "job")


def test_mean_is_that_of_clipped_contributions_and_undefined_ones_count_as_the_bound() -> None:
    release = build_release(noise_multiplier=1e-9)
    values = torch.tensor([[5.0], [50.0], [float("nan")], [-1.0]])
    assert release.release("test", MODEL, (), values)["mae"] == pytest.approx((5 + 20 + 20 + 0) / 4)


def test_noise_has_the_scale_of_what_one_subject_changes_in_all_metrics_together() -> None:
    bounds = {f"m{number:04}": 1.0 + number % 3 for number in range(2500)}
    noisy = build_release(bounds=bounds).release("test", MODEL, (), torch.zeros(10, 2500))
    scaled = torch.tensor([noisy[name] / bound for name, bound in bounds.items()])
    assert float(scaled.std()) == pytest.approx(2.0 * 50 / 10, rel=0.05)
    assert abs(float(scaled.mean())) < 1


def test_model_is_charged_once_and_has_the_same_metrics_again() -> None:
    account = PrivacyAccount()
    release, values = build_release(account), torch.full((10, 1), 3.0)
    first = release.release("test", MODEL, (), values)
    assert release.release("test", MODEL, (), values) == first
    assert [entry.charge for entry in account.read().entries] == [Charge(2.0, 1.0, 1)]
    others = [release.release("test", MODEL + 1e-6, (), values), release.release("validation", MODEL, (), values)]
    # Other noise for other data: equal noise would show the difference.
    others.append(release.release("test", MODEL, (), values + 1))
    assert len({first["mae"], *(other["mae"] for other in others)}) == 4
    assert [entry.part for entry in account.read().entries] == ["test", "test", "validation", "test"]


def test_noise_keeps_the_budget_over_all_releases_of_a_job_and_no_more() -> None:
    account = PrivacyAccount()
    release, values = build_release(account, epsilon=3.0), torch.zeros(10, 1)
    for number in range(4):
        release.release("test", MODEL + number, (), values)
    assert 2.9 < account.compute_spent(RUN, 1e-5) <= 3
    with pytest.raises(BudgetSpent, match=r"the job's privacy\.epsilon is 3"):
        release.release("test", MODEL + 4, (), values)
    # Validation subjects are other people.
    release.release("validation", MODEL, (), values)
    assert 2.9 < account.compute_spent(RUN, 1e-5) <= 3


def test_limit_of_the_site_adds_all_parts() -> None:
    once = compute_epsilon([Charge(2.0, 1.0, 1)], 1e-5)
    account = PrivacyAccount(None, Budget(once * 1.01, 1e-5))
    release, values = build_release(account), torch.zeros(10, 1)
    release.release("test", MODEL, (), values)
    with pytest.raises(BudgetSpent, match="epsilon of this site's policy, over all jobs"):
        release.release("validation", MODEL, (), values)


@pytest.mark.parametrize(
    "settings",
    [{"metrics": "noised"}, {"metric_bounds": {"mae": 1}}, {"metrics": "noised", "metric_bounds": {"mae": 0}}],
)
def test_noise_needs_a_bound_of_every_metric(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="metric_bounds"):
        PrivacyConfig.model_validate({"epsilon": 3, **settings})


def test_settings_without_bounds_show_none() -> None:
    assert "metric_bounds" not in repr(build_release().config)


def test_noise_of_ten_rounds_at_epsilon_three_is_the_one_in_the_documentation() -> None:
    """docs/differential-privacy.md: 5 / n of the bound, for ten rounds and the result."""
    release = replace(build_release(epsilon=3.0), releases=11)
    assert release.noise_multiplier == pytest.approx(5, rel=0.01)
