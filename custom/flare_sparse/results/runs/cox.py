"""Cox regression with a penalty: the linear baseline of survival times."""

from __future__ import annotations

import numpy as np


def compute_partial_loss(log_hazard: np.ndarray, times: np.ndarray, events: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the negative logarithm of Cox's partial likelihood, and its derivative by each hazard's logarithm.

    Cox (1972), J. R. Stat. Soc. B 34:187, with Breslow's form for tied times. All arrays are ``(n,)``.

    Returns:
        The loss, a sum over the events, and its gradient ``(n,)``.
    """
    order = np.argsort(-times, kind="stable")
    eta, event, time = log_hazard[order], events[order], times[order]
    # Equal times share a risk set: that of the last of them in descending order.
    last = np.searchsorted(-time, -time, side="right") - 1
    shift = eta.max(initial=0.0)
    hazard = np.exp(eta - shift)
    total = np.cumsum(hazard)[last]
    loss = float(np.sum(event * (np.log(total) + shift - eta)))
    # A subject is at risk at its own time and at all earlier ones: those at its position and after it, ties included.
    inverse = np.cumsum((event / total)[::-1])[::-1]
    first = np.searchsorted(-time, -time, side="left")
    gradient = np.zeros(len(eta))
    gradient[order] = hazard * inverse[first] - event
    return loss, gradient


def fit_cox(x: np.ndarray, times: np.ndarray, events: np.ndarray, penalty: float) -> np.ndarray:
    """Return coefficients ``(d,)`` that minimise the partial loss plus ``penalty / 2`` times their squared norm.

    Args:
        x: standardised features ``(n, d)``.
        times: ``(n,)``.
        events: ``(n,)`` 1 for an event, else 0.
        penalty: strength of the penalty.
    """
    from scipy.optimize import minimize

    def compute(coefficients: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = compute_partial_loss(x @ coefficients, times, events)
        return loss + penalty / 2 * float(coefficients @ coefficients), x.T @ gradient + penalty * coefficients

    return np.asarray(minimize(compute, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x)
