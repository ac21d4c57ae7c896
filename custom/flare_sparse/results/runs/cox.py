"""Cox regression with a penalty: the linear baseline of survival times.

Equal to lifelines' CoxPHFitter (``tests/results/runs/test_cox.py``), which does not replace it: it has Efron's form for
tied times only, its Newton steps diverge where a table has more columns than subjects, and its likelihood of held-out
subjects is infinite where one is far from all others. scikit-survival has Breslow's form, under GPL-3.
"""

import numpy as np


def compute_partial_loss(log_hazard: np.ndarray, times: np.ndarray, events: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the negative logarithm of Cox's partial likelihood, and its derivative by each hazard's logarithm.

    Cox (1972), J. R. Stat. Soc. B 34:187, with Breslow's form for tied times. All arrays are ``(n,)``.

    Returns:
        The loss, a sum over the events, and its gradient ``(n,)``.
    """
    order = np.argsort(-times, kind="stable")
    eta, event, time = log_hazard[order], events[order] > 0, times[order]
    # Equal times share a risk set: that of the last of them in descending order. Sums of hazards stay logarithms: where
    # one log-hazard is 800 below another, its hazard is 0 in float64, and its own risk set would be empty.
    last = np.searchsorted(-time, -time, side="right") - 1
    log_total = np.logaddexp.accumulate(eta)[last]
    loss = float(np.sum((log_total - eta)[event]))
    # A subject is at risk at its own time and at all earlier ones: those at its position and after it, ties included.
    log_inverse = np.logaddexp.accumulate(np.where(event, -log_total, -np.inf)[::-1])[::-1]
    first = np.searchsorted(-time, -time, side="left")
    gradient = np.zeros(len(eta))
    gradient[order] = np.exp(eta + log_inverse[first]) - event
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

    # The default limits leave an error of 1e-5.
    limits = {"ftol": 1e-12, "gtol": 1e-6}
    return np.asarray(minimize(compute, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options=limits).x)
