"""Settings as a function of the round (1-based, C1): sparsity, and the steps of accelerated methods."""

from __future__ import annotations

from dataclasses import dataclass


def polynomial(
    t: int, *, start: float, end: float, first: int, last: int, exponent: float = 3.0, every: int = 1
) -> float:
    """FedSparsify Eq. 1: from ``start`` in round ``first`` to ``end`` in round ``last``, in steps of ``every`` rounds.

    ``s_t = S_T + (S_0 - S_T) * (1 - (F * floor(t / F) - t_0) / (T - t_0)) ** n``, held at ``start`` before ``first``
    and at ``end`` after ``last``; ``first == last`` is one-shot pruning.

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
class Steps:
    """Of one round: alpha mixes the sequences, beta and eta are the lengths of the two proximal steps."""

    alpha: float
    beta: float
    eta: float


def accelerated(
    t: int, *, beta: float = 1.0, acceleration: bool = True, momentum_cap: float = 1.0, restart_every: int | None = None
) -> Steps:
    """MetaGater's step sequences: ``alpha_t = 2 / (t + 1)`` and ``alpha_t * eta_t = beta_t`` (Lin et al. 2021, 5.1).

    Args:
        t: round, 1-based.
        beta: beta_t, the same in all rounds.
        acceleration: False: alpha is 1, the three sequences are one.
        momentum_cap: largest Nesterov momentum; alpha never falls below 1 minus this.
        restart_every: rounds after which alpha begins again at 1.
    """
    if not acceleration:
        return Steps(1.0, beta, beta)
    since = t if restart_every is None else (t - 1) % restart_every + 1
    alpha = max(2 / (since + 1), 1 - momentum_cap)
    return Steps(alpha, beta, beta / alpha)
