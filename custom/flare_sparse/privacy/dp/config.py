"""Settings of differential privacy, the same at every site of a job."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ...core.settings import Settings
from .account import Budget
from .accounting import MAX_DELTA, MAX_EPSILON, MIN_DELTA, MIN_EPSILON, SamplingPlan, solve_noise_multiplier


class PrivacyConfig(Settings):
    """Settings of DP-SGD (Abadi et al. 2016, arXiv 1607.00133, Algorithm 1) at every site."""

    # The accountant has no answer, or none in a reasonable time, far outside of these ranges.
    epsilon: float | None = Field(None, ge=MIN_EPSILON, le=MAX_EPSILON)
    """budget of a subject over the whole job; every site computes its noise from it, its number of subjects and the
    job's steps; null: noise_multiplier is given"""
    delta: float = Field(1e-5, ge=MIN_DELTA, le=MAX_DELTA)
    """probability that epsilon does not bound; below 1 / subjects"""
    noise_multiplier: float | None = Field(None, ge=1e-12, le=1e6)
    """standard deviation of the noise as a multiple of clip; null: computed from epsilon"""
    clip: float = Field(1.0, gt=0)
    """largest L2 norm of a subject's gradient over the live entries"""
    unit: Literal["subject", "record"] = "subject"
    """what is protected; subject: all training examples of one subject of a site together; record: a record of the
    loader that a training script gives to make_private"""
    metrics: Literal["exact", "none"] = "exact"
    """metrics on test and validation examples, which are other subjects than those of training; exact: they leave and
    are not part of the budget; none: they stay at the site"""

    @model_validator(mode="after")
    def _check_noise(self) -> Self:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("set either epsilon, from which the noise is computed, or noise_multiplier")
        return self

    def choose_noise(self, plan: SamplingPlan) -> float:
        """Return the noise that the job gives, or the one with which a whole job keeps its budget.

        Raises:
            ConfigError: no noise keeps it, or Opacus is not installed.
        """
        if self.epsilon is None:
            assert self.noise_multiplier is not None, "one of the two is set"
            return self.noise_multiplier
        return solve_noise_multiplier(self.epsilon, self.delta, plan)

    def build_budget(self, plan: SamplingPlan, noise_multiplier: float) -> Budget | None:
        """Return the budget of a run; None if the job gives the noise instead."""
        planned = plan.build_job_charge(noise_multiplier)
        return None if self.epsilon is None else Budget(self.epsilon, self.delta, planned)
