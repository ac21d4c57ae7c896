"""How well predicted risks rank two classes.

MONAI has both metrics. To import MONAI takes a process several seconds, and a table or a survival model needs nothing
else of it.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor


def compute_auc(risk: Tensor, classes: Tensor) -> float:
    """Return the area under the ROC curve; equal risks count half.

    Args:
        risk: predicted risk of class 1, ``(n,)``.
        classes: 0 or 1, ``(n,)``; both occur.
    """
    values, positive = risk.detach().cpu().numpy(), classes.detach().cpu().numpy() > 0.5
    negatives, positives = np.sort(values[~positive]), values[positive]
    lower = np.searchsorted(negatives, positives, "left") + np.searchsorted(negatives, positives, "right")
    # A sum of integers: exact, whatever the order.
    return float(lower.sum() / 2 / (len(positives) * len(negatives)))


def compute_average_precision(risk: Tensor, classes: Tensor) -> float:
    """Return the mean over the examples of class 1 of the precision at their risk.

    Args:
        risk: predicted risk of class 1, ``(n,)``.
        classes: 0 or 1, ``(n,)``; 1 occurs.
    """
    values, positive = risk.detach().cpu().numpy(), classes.detach().cpu().numpy() > 0.5
    order = np.argsort(-values, kind="stable")
    ranked, hits = values[order], np.cumsum(positive[order])
    # The last example of each risk: a threshold takes in all equal risks.
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    gained = np.diff(hits[last], prepend=0)
    return float((gained * (hits[last] / (last + 1))).sum() / hits[-1])
