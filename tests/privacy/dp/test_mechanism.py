"""The mechanism: bounded by every subject, noise of the right scale, the same answer to the same question."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.core.mask import Mask
from flare_sparse.privacy.dp.account import Budget, BudgetSpent, PrivacyAccount
from flare_sparse.privacy.dp.accounting import SamplingPlan
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.mechanism import PrivateQuery, SiteMechanism, clip_rows

PLAN = SamplingPlan(200, 20, 5, 4)
START, MASK = torch.linspace(-1, 1, 30), Mask.full(30)


def mechanism(account: PrivacyAccount | None = None, **settings: float) -> SiteMechanism:
    config = PrivacyConfig.model_validate(settings or {"noise_multiplier": 2.0, "clip": 0.5})
    return SiteMechanism(config, PLAN, account or PrivacyAccount(), "a" * 16, "job")


def ask(own: SiteMechanism, start: torch.Tensor = START, t: int = 1) -> PrivateQuery:
    return own.open(start, MASK, PLAN, t, ("site-1",))


@given(
    st.integers(0, 5), st.floats(1e-3, 1e3), st.sampled_from([1e-6, 1.0, 1e6, 1e20]), st.booleans(), st.integers(0, 99)
)
def test_one_more_subject_changes_the_sum_by_at_most_clip(
    others: int, clip: float, scale: float, is_broken: bool, seed: int
) -> None:
    rows = torch.randn(others + 1, 7, generator=torch.Generator().manual_seed(seed)) * scale
    if is_broken:
        rows[-1, 3] = float("nan")
    change = clip_rows(rows, clip) - clip_rows(rows[:-1], clip)
    assert float(change.norm()) <= clip * (1 + 1e-9)
    assert not is_broken or float(change.norm()) == 0


def test_short_rows_are_not_changed() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.03, 0.04]])
    torch.testing.assert_close(clip_rows(rows, 1.0), torch.tensor([0.63, 0.84], dtype=torch.float64))


def test_noise_has_the_scale_of_clip_times_multiplier_over_the_lot() -> None:
    question = ask(mechanism())
    noise = question.privatize(torch.zeros(100_000, dtype=torch.float64), 1)
    assert float(noise.std()) == pytest.approx(2.0 * 0.5 / 20, rel=0.02)
    assert abs(float(noise.mean())) < 0.001
    mean = question.privatize(torch.full((100_000,), 20.0, dtype=torch.float64), 1)
    assert float(mean.mean()) == pytest.approx(1.0, abs=0.001)


def test_training_beyond_the_budget_is_refused_before_it_begins() -> None:
    account = PrivacyAccount(None, Budget(1.0, 1e-5))
    with pytest.raises(BudgetSpent):
        ask(mechanism(account, noise_multiplier=0.1))
    assert ask(mechanism(account, noise_multiplier=50.0))
    assert not account.read().entries


def test_subjects_take_part_with_the_sampling_rate_and_independently_by_step() -> None:
    question = ask(mechanism())
    samples = [question.sample_subjects(step) for step in range(1, 301)]
    sizes = torch.tensor([len(sample) for sample in samples], dtype=torch.float64)
    assert float(sizes.mean()) == pytest.approx(20, rel=0.05)
    # Poisson sampling: the number of subjects varies as a binomial number does.
    assert float(sizes.var()) == pytest.approx(200 * 0.1 * 0.9, rel=0.3)
    assert samples[0] != samples[1]
    assert all(sample == sorted(set(sample)) for sample in samples)


def test_question_asked_again_has_the_same_sample_and_noise_and_any_other_has_not() -> None:
    account = PrivacyAccount()
    total = torch.ones(30, dtype=torch.float64)
    first, again = ask(mechanism(account)), ask(mechanism(account))
    assert first.sample_subjects(1) == again.sample_subjects(1)
    assert torch.equal(first.privatize(total, 1), again.privatize(total, 1))
    others = [ask(mechanism(account), START + 1e-6), ask(mechanism(account), t=2), ask(mechanism())]
    for other in others:
        assert other.sample_subjects(1) != first.sample_subjects(1)
        assert not torch.isclose(other.privatize(total, 1), first.privatize(total, 1)).any()
    assert not torch.isclose(first.privatize(total, 2), first.privatize(total, 1)).any()


def test_noise_of_two_sums_is_independent_so_their_difference_stays_hidden() -> None:
    question, total = ask(mechanism()), torch.zeros(30, dtype=torch.float64)
    changed = total.clone()
    changed[0] = 1e-9
    difference = question.privatize(changed, 1) - question.privatize(total, 1)
    assert float(difference[1:].abs().min()) > 1e-6


def test_training_is_charged_once_for_the_same_values() -> None:
    own = mechanism()
    for _ in range(2):
        ask(own).record(torch.ones(3))
    assert [entry.steps for entry in own.account.read().entries] == [5]
    ask(own).record(torch.zeros(3))
    assert len(own.account.read().entries) == 2


@pytest.mark.long
def test_planned_trainings_spend_the_budget_and_one_more_is_refused() -> None:
    own = mechanism(epsilon=2.0)
    for t in range(1, 5):
        ask(own, t=t).record(torch.full((3,), float(t)))
    assert 1.98 <= own.compute_spent() <= 2.0
    with pytest.raises(BudgetSpent, match=r"the job's privacy\.epsilon is 2 at delta 1e-05"):
        ask(own, t=5)
    # A round that was answered is answered again.
    ask(own, t=4).record(torch.full((3,), 4.0))
    assert len(own.account.read().entries) == 4


@pytest.mark.parametrize(
    "settings",
    [
        *({"noise_multiplier": 1e-300}, {"noise_multiplier": 1e308}, {"epsilon": 1e15}, {"epsilon": 0.049}),
        *({"epsilon": 1, "delta": 0.999999}, {"epsilon": 1, "delta": 1e-30}),
    ],
)
def test_settings_for_which_the_accountants_have_no_answer_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"should be (less|greater) than or equal to"):
        PrivacyConfig.model_validate(settings)


@pytest.mark.parametrize("settings", [{}, {"epsilon": 1, "noise_multiplier": 1}])
def test_either_epsilon_or_noise_is_set(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="set either epsilon, from which the noise is computed, or noise_multiplier"):
        PrivacyConfig.model_validate(settings)
