"""Sparsity as a function of the round (1-based, C1)."""

from __future__ import annotations


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
