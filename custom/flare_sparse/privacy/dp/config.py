"""Settings of differential privacy, the same at every site of a job."""

from collections.abc import Callable
from typing import Literal, Self

from pydantic import Field, model_validator

from ...core.settings import Settings
from .accounting import MAX_DELTA, MAX_EPSILON, MIN_DELTA


class PrivacyConfig(Settings):
    """Settings of DP-SGD (Abadi et al. 2016, arXiv 1607.00133, Algorithm 1) at every site."""

    # The accountant has no answer, or none in a reasonable time, far outside of these ranges.
    epsilon: float | None = Field(None, gt=0, le=MAX_EPSILON)
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

    def choose_noise(self, solve: Callable[[float, float], float]) -> float:
        """Return the noise that the job gives, or the one that keeps its budget.

        Args:
            solve: returns the noise of an epsilon and a delta.
        """
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None, "one of the two is set"
        return solve(self.epsilon, self.delta)
