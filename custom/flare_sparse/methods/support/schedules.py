"""Schedules over rounds (1-based): sparsity, and the step sizes of accelerated methods.

See docs/algorithms.md, sections 1.5, 2.4 and 6.3.
"""

from dataclasses import dataclass


def compute_polynomial_sparsity(
    t: int, *, start: float, end: float, first: int, last: int, exponent: float = 3.0, every: int = 1
) -> float:
    """Return the sparsity after round ``t``, between 0 and 1 (Stripelis et al. 2022, Eq. 1).

    ``s_t = S_T + (S_0 - S_T) * (1 - (F * floor(t / F) - t_0) / (T - t_0)) ** n``

    Args:
        t: round, 1-based.
        start: S_0, the sparsity before round ``first``.
        end: S_T, the sparsity from round ``last`` on.
        first: t_0, first round of the schedule.
        last: T, last round of the schedule; one-shot pruning where it equals ``first``.
        exponent: n.
        every: F, rounds between prunings.

    Raises:
        ValueError: ``start`` is above ``end``, or ``every`` or ``first`` is below 1.
    """
    if not 0 <= start <= end < 1:
        raise ValueError(f"sparsity must rise within [0, 1): start {start}, end {end}")
    if every < 1 or first < 1:
        raise ValueError(f"every and first must be at least 1: every {every}, first {first}")
    step = every * (t // every)
    if t >= first >= last:
        return end
    if step < first:
        return start
    if step >= last:
        return end
    return end + (start - end) * float((1 - (step - first) / (last - first)) ** exponent)


@dataclass(frozen=True)
class StepSizes:
    """Step sizes of one round.

    Attributes:
        alpha: weight of the one sequence in the prediction from both.
        beta: length of the proximal step of the aggregated sequence.
        eta: length of the proximal step of the other.
    """

    alpha: float
    beta: float
    eta: float


def compute_step_sizes(t: int, *, beta: float = 1.0, momentum_cap: float = 1.0) -> StepSizes:
    """Return MetaGater's step sizes: ``alpha_t = 2 / (t + 1)``, ``alpha_t * eta_t = beta_t`` (Lin et al. 2021, 5.1).

    Args:
        t: round, 1-based.
        beta: beta_t, the same in every round.
        momentum_cap: largest Nesterov momentum; alpha is at least 1 minus this. At 0 alpha is 1, which makes the three
            sequences one.
    """
    alpha = max(2 / (t + 1), 1 - momentum_cap)
    return StepSizes(alpha, beta, beta / alpha)
