"""Epsilon of steps of the subsampled Gaussian mechanism, by the accountants of Opacus."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ...core.errors import ConfigError, require_extra

MIN_EPSILON = 0.05
"""Smallest budget that noise is computed for: the PRV accountant's own error is 0.01."""
MAX_EPSILON, MIN_DELTA, MAX_DELTA = 1e3, 1e-12, 0.01
"""Ranges in which the accountants answer, and in a reasonable time; a larger epsilon bounds nothing."""
_ACCURACY = 0.01
"""Error of epsilon of the PRV accountant."""
_MAX_POINTS = 2**22
"""Points of the PRV accountant's grid, whose arrays take a gigabyte then; a tiny noise would ask for terabytes."""
_BOUNDED = "prv of bounded size"
"""Name of the accountant that does not exceed :data:`_MAX_POINTS`."""


@dataclass(frozen=True)
class Charge:
    """Steps of the mechanism with the same noise and the same sampling rate.

    Attributes:
        noise_multiplier: standard deviation of the noise, as a multiple of the clipping norm.
        sample_rate: probability with which a subject takes part in a step.
        steps: number of steps.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int


@dataclass(frozen=True)
class SamplingPlan:
    """Poisson sampling of subjects in one training.

    Attributes:
        subjects: number of subjects with training examples, at least 1.
        lot_size: expected number of subjects in a step.
        steps: steps of one training.
        trainings: trainings of the job.
        score_steps: steps of the job before its trainings, for scores.
    """

    subjects: int
    lot_size: int
    steps: int
    trainings: int
    # Left out of the text that names a question, which has steps of one kind only.
    score_steps: int = field(default=0, repr=False)

    @classmethod
    def build(cls, subjects: int, batch_size: int, epochs: int, trainings: int, accumulate: int = 1) -> SamplingPlan:
        """Return the plan of trainings of ``epochs`` expected passes, with lots of ``batch_size * accumulate``.

        >>> SamplingPlan.build(100, 16, 2, 10)
        SamplingPlan(subjects=100, lot_size=16, steps=14, trainings=10)
        """
        lot_size = min(subjects, batch_size * accumulate)
        return cls(subjects, lot_size, epochs * -(-subjects // lot_size), trainings)

    @property
    def sample_rate(self) -> float:
        """Probability with which a subject takes part in a step."""
        return self.lot_size / self.subjects

    def build_charge(self, noise_multiplier: float, trainings: int = 1) -> Charge:
        """Return the charge of some trainings."""
        return Charge(noise_multiplier, self.sample_rate, trainings * self.steps)

    def build_job_charge(self, noise_multiplier: float, trainings: int | None = None) -> Charge:
        """Return the charge of the scores and of some trainings; None: of all."""
        steps = self.score_steps + (self.trainings if trainings is None else trainings) * self.steps
        return Charge(noise_multiplier, self.sample_rate, steps)


def compute_epsilon(charges: Iterable[Charge], delta: float) -> float:
    """Return an upper bound of epsilon of the composition of all charges; 0 for none.

    The accountant composes privacy loss random variables (Gopi et al. 2021, arXiv 2106.02848). The order of the charges
    does not matter.

    Args:
        charges: steps of the mechanism.
        delta: probability that epsilon does not bound.

    Raises:
        ConfigError: Opacus is not installed.
    """
    return _compute_epsilon(merge_charges(charges), delta)


def combine_answers(answers: Sequence[Charge]) -> Charge:
    """Return the charge of several answers to one question, at least one.

    They have the same sample of subjects, so that rate and steps of the first are those of all, and independent noise,
    which together tell as much as one answer with less noise. Added up as if each had a sample of its own, they would
    seem to tell less than they do.

    >>> combine_answers([Charge(2.0, 0.1, 10)] * 4)
    Charge(noise_multiplier=1.0, sample_rate=0.1, steps=10)
    """
    first, *others = answers
    if not others:
        return first
    return replace(first, noise_multiplier=1 / math.hypot(*(1 / answer.noise_multiplier for answer in answers)))


def merge_charges(charges: Iterable[Charge]) -> tuple[Charge, ...]:
    """Return the charges with the steps of equal noise and sampling rate added up, in a fixed order."""
    steps: dict[tuple[float, float], int] = {}
    for charge in charges:
        key = charge.noise_multiplier, charge.sample_rate
        steps[key] = steps.get(key, 0) + charge.steps
    return tuple(Charge(*key, count) for key, count in sorted(steps.items()) if count)


def solve_noise_multiplier(epsilon: float, delta: float, plan: SamplingPlan) -> float:
    """Return the smallest noise multiplier, to within 0.01 of epsilon, with which a whole job keeps a budget.

    Raises:
        ConfigError: no noise keeps it, or Opacus is not installed.
    """
    return _solve(epsilon, delta, plan.build_job_charge(1.0))


@lru_cache(maxsize=4096)
def _compute_epsilon(charges: tuple[Charge, ...], delta: float) -> float:
    if not charges:
        return 0.0
    accountant = _import_accountants().create_accountant(mechanism=_BOUNDED)
    accountant.history = [(charge.noise_multiplier, charge.sample_rate, charge.steps) for charge in charges]
    return float(_call_quietly(accountant.get_epsilon, delta=delta))


def _fits(renyi: Any, delta: float, max_points: int) -> bool:
    """Return whether the grid of the PRV accountant has at most so many points.

    It covers epsilon at a small delta, in steps that shrink with the number of compositions (Gopi et al. 2021, arXiv
    2106.02848, theorem 5.5).

    Args:
        renyi: Opacus's Renyi accountant with the history.
        delta: probability that epsilon does not bound.
        max_points: largest number of points.
    """
    radius = renyi.get_epsilon(delta=delta / 4000)
    compositions = sum(steps for _, _, steps in renyi.history)
    mesh = _ACCURACY / math.sqrt(compositions * math.log(12_000 / delta) / 2)
    return bool(2 * radius / mesh <= max_points)


@lru_cache(maxsize=4096)
def _solve(epsilon: float, delta: float, unit: Charge) -> float:
    sigma = _solve_by("rdp", epsilon, delta, unit)
    renyi = _import_accountants().RDPAccountant()
    renyi.history = [(sigma, unit.sample_rate, unit.steps)]
    # Near the limit the two accountants would alternate, and the search would not end.
    fits = unit.sample_rate < 1 and _call_quietly(_fits, renyi=renyi, delta=delta, max_points=_MAX_POINTS * 3 // 4)
    return _solve_by(_BOUNDED, epsilon, delta, unit) if fits else sigma


def _solve_by(accountant: str, epsilon: float, delta: float, unit: Charge) -> float:
    _import_accountants()
    from opacus.accountants.utils import get_noise_multiplier

    try:
        sigma = _call_quietly(
            get_noise_multiplier,
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=unit.sample_rate,
            steps=unit.steps,
            accountant=accountant,
        )
    except ValueError as error:
        raise ConfigError(
            f"privacy.epsilon {epsilon:g} with delta {delta:g}: no noise keeps it over {unit.steps} steps at a "
            f"sampling rate of {unit.sample_rate:.3g}; raise epsilon, or lower rounds, epochs or batch_size"
        ) from error
    return float(sigma)


@lru_cache(maxsize=1)
def _import_accountants() -> Any:
    # Opacus takes seconds to import.
    with require_extra("privacy", "privacy"):
        from opacus import accountants

    class BoundedAccountant(accountants.PRVAccountant):  # type: ignore[misc]
        """The PRV accountant where it applies, else the Renyi accountant, whose bound is looser and valid everywhere.

        The PRV accountant divides by zero without subsampling, and its grid must fit into the memory.
        """

        def get_epsilon(self, delta: float, **options: Any) -> float:
            renyi = accountants.RDPAccountant()
            renyi.history = self.history
            is_subsampled = all(sample_rate < 1 for _, sample_rate, _ in self.history)
            if is_subsampled and _fits(renyi, delta, _MAX_POINTS):
                return float(super().get_epsilon(delta, **options))
            return float(renyi.get_epsilon(delta=delta))

    accountants.register_accountant(_BOUNDED, BoundedAccountant, force=True)
    return accountants


def _call_quietly(function: Callable[..., Any], **arguments: Any) -> Any:
    # The accountants start from a range of Renyi orders and warn where its end is the best one: the bound is valid.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return function(**arguments)
