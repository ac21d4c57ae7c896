"""What a job will charge a site's subjects, before it runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .account import Budget
from .accounting import Charge, SamplingPlan, compute_epsilon
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
        sigma = config.choose_noise(plan)
        epsilon = compute_epsilon([plan.build_job_charge(sigma)], config.delta)
        if limit is None:
            return cls(plan, sigma, epsilon, config.delta, plan.trainings)
        affordable = bisect_left(
            range(1, plan.trainings + 1),
            True,
            key=lambda trainings: limit.is_exceeded_by([*earlier, plan.build_job_charge(sigma, trainings)]),
        )
        return cls(plan, sigma, epsilon, config.delta, affordable, compute_epsilon(earlier, limit.delta))

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
