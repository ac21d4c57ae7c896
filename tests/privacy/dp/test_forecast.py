"""Forecasts say before a run what it charges, and how many rounds a site's budget covers."""

from __future__ import annotations

from flare_sparse.privacy.dp.account import Budget
from flare_sparse.privacy.dp.accounting import Charge, SamplingPlan, compute_epsilon
from flare_sparse.privacy.dp.config import PrivacyConfig
from flare_sparse.privacy.dp.forecast import Forecast, explain_shortage

DELTA = 1e-5
# Every subject in every step, for which the accountant takes a millisecond.
PLAN = SamplingPlan.build(10, 10, 2, 6)
CONFIG = PrivacyConfig(noise_multiplier=4.0)


def spend(trainings: int) -> float:
    return compute_epsilon([PLAN.build_charge(4.0, trainings)], DELTA)


def test_forecast_is_what_the_job_charges() -> None:
    forecast = Forecast.compute(CONFIG, PLAN)
    assert forecast.epsilon == spend(6)
    assert explain_shortage(forecast, Budget(spend(6), DELTA)) == ""
    assert forecast.to_dict() == {
        "subjects": 10, "sample_rate": 1.0, "steps": 12, "noise_multiplier": 4.0, "epsilon": spend(6)
    }  # fmt: skip
    assert str(forecast) == (
        f"epsilon {spend(6):.2f} at delta 1e-05: 10 subjects, sampling rate 1, 12 steps, noise 4.00 * clip"
    )


def test_budget_that_is_too_small_names_the_rounds_that_it_covers() -> None:
    limit = Budget(spend(4), DELTA)
    forecast = Forecast.compute(CONFIG, PLAN, limit)
    assert forecast.affordable == 4
    assert (
        f"the job charges {spend(6):.2f}; the budget over all jobs is {spend(4):g} at delta 1e-05. It covers 4 of"
        in (explain_shortage(forecast, limit))
    )


def test_earlier_jobs_leave_fewer_rounds() -> None:
    limit = Budget(spend(6), DELTA)
    forecast = Forecast.compute(CONFIG, PLAN, limit, [Charge(4.0, 1.0, 2 * PLAN.steps)])
    assert (forecast.affordable, forecast.spent) == (4, spend(2))
    assert f"of which {spend(2):.2f} is spent. It covers 4 of 6 rounds" in explain_shortage(forecast, limit)


def test_delta_that_allows_to_publish_a_subject_is_pointed_out() -> None:
    plan = SamplingPlan.build(1000, 1000, 1, 1)
    forecast = Forecast.compute(PrivacyConfig(noise_multiplier=4.0, delta=1e-3), plan)
    assert str(forecast).endswith("delta is not below 1 / subjects: lower it")
