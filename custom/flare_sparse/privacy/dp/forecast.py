"""What a job will charge a site's subjects, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .account import Budget
from .accounting import Charge, SamplingPlan, compute_epsilon, solve_noise_multiplier
from .config import PrivacyConfig


@dataclass(frozen=True)
class Forecast:
    """What a job charges a site's subjects.

    Attributes:
        plan: sampling of the site.
        noise_multiplier: standard deviation of the noise as a multiple of the clipping norm.
        epsilon: epsilon of the whole job at the job's delta.
        delta: the job's delta.
        affordable: trainings that fit into the site's own budget; all of them without one.
        spent: epsilon that earlier jobs have charged, at the delta of the site's budget; 0 without one.
    """

    plan: SamplingPlan
    noise_multiplier: float
    epsilon: float
    delta: float
    affordable: int
    spent: float = 0.0

    @classmethod
    def compute(
        cls, config: PrivacyConfig, plan: SamplingPlan, limit: Budget | None = None, earlier: Sequence[Charge] = ()
    ) -> Forecast:
        """Return the forecast of a job at a site.

        Args:
            config: settings of the job.
            plan: sampling of the site.
            limit: the site's budget over all jobs; None: it has none.
            earlier: what earlier jobs have charged.

        Raises:
            ConfigError: no noise keeps the job's budget, or Opacus is not installed.
        """
        sigma = config.noise_multiplier or solve_noise_multiplier(config.epsilon or 0.0, config.delta, plan)
        epsilon = compute_epsilon([plan.build_job_charge(sigma)], config.delta)
        if limit is None:
            return cls(plan, sigma, epsilon, config.delta, plan.trainings)
        spent = compute_epsilon(earlier, limit.delta)
        affordable = _count_affordable(plan, sigma, limit, earlier)
        return cls(plan, sigma, epsilon, config.delta, affordable, spent)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "subjects": self.plan.subjects,
            "sample_rate": self.plan.sample_rate,
            "steps": self.plan.build_job_charge(self.noise_multiplier).steps,
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
        }

    def __str__(self) -> str:
        plan, steps = self.plan, self.plan.build_job_charge(self.noise_multiplier).steps
        text = (
            f"epsilon {self.epsilon:.2f} at delta {self.delta:g}: {plan.subjects} subjects, sampling rate "
            f"{plan.sample_rate:.3g}, {steps} steps, noise {self.noise_multiplier:.2f} * clip"
        )
        # A delta of 1 / n allows to publish one subject outright.
        return text if self.delta * plan.subjects < 1 else f"{text}; delta is not below 1 / subjects: lower it"


def _count_affordable(plan: SamplingPlan, sigma: float, limit: Budget, earlier: Sequence[Charge]) -> int:
    """Return the largest number of trainings, up to the plan's, that fit into a budget."""
    low, high = 0, plan.trainings
    while low < high:
        middle = (low + high + 1) // 2
        if limit.is_exceeded_by([*earlier, plan.build_job_charge(sigma, middle)]):
            high = middle - 1
        else:
            low = middle
    return low


def explain_shortage(forecast: Forecast, limit: Budget) -> str:
    """Return why a budget does not cover a job, and what to change; empty if it does."""
    if forecast.affordable >= forecast.plan.trainings:
        return ""
    spent = f", of which {forecast.spent:.2f} is spent" if forecast.spent else ""
    return (
        f"epsilon: the job charges {forecast.epsilon:.2f}; the budget over all jobs is {limit.epsilon:g} at delta "
        f"{limit.delta:g}{spent}. It covers {forecast.affordable} of {forecast.plan.trainings} rounds, and the site "
        "abstains from the others; lower privacy.epsilon or method.rounds"
    )
