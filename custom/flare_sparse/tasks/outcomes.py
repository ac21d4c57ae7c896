"""What the generic table task predicts: a number, one of two classes, one of several, or the time of an event."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import DataError
from .classes import compute_binary_metrics, compute_cross_entropy
from .data.features import Labels, format_labels, number_labels, read_labels
from .data.tables import Table
from .task import Kind, Metric

_TRANSFORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "none": (lambda values: values, lambda values: values),
    "log": (torch.log, torch.exp),
    "log1p": (torch.log1p, torch.expm1),
}
"""Transforms of a target and their inverses."""
PAIRS_AT_ONCE = 2**20
"""Pairs of subjects that a C-index compares at a time."""


class TableOutcome(ABC):
    """One kind of target.

    Attributes:
        kind: the kind.
        metric: the metric that models are compared by.
        outputs: number of the network's outputs.
    """

    kind: Kind
    metric: Metric
    outputs: int = 1

    @abstractmethod
    def read(self, table: Table) -> np.ndarray:
        """Return the targets of all rows, ``(n, t)`` float64; NaN where one is missing."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, a scalar."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predictions ``(B, k)`` of a batch in the metric's unit."""

    @abstractmethod
    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics; an undefined one is omitted."""


class NumberOutcome(TableOutcome):
    """A number, which the network sees as ``(transformed value - center) / spread``."""

    kind = "regression"

    def __init__(self, target: str, unit: str, center: float, spread: float, transform: str = "none"):
        self._target, self._center, self._spread, self._transform = target, center, spread, transform
        self.metric = Metric("mae", unit, "min")

    def read(self, table: Table) -> np.ndarray:
        """Return the numbers in the target's column.

        Raises:
            DataError: the logarithm of a number is undefined.
        """
        values = table.get_numbers(self._target)
        lowest = {"log": 0.0, "log1p": -1.0}.get(self._transform, -np.inf)
        if len(rows := np.flatnonzero(values <= lowest)):
            other = ", or set task.target_transform: log1p, the logarithm of 1 + x" if self._transform == "log" else ""
            raise DataError(
                f"{table.source}: column {self._target!r} is {values[rows[0]]:g} (row {rows[0] + 1}); "
                f"task.target_transform: {self._transform} needs numbers above {lowest:g}. Correct the data{other}"
            )
        return np.where(np.isfinite(values), values, np.nan)[:, None]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the smooth L1 error of the standardised value."""
        return functional.smooth_l1_loss(outputs, self.standardise(targets))

    def standardise(self, targets: Tensor) -> Tensor:
        """Return targets in the network's units."""
        return (_TRANSFORMS[self._transform][0](targets) - self._center) / self._spread

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the values in the target's own unit."""
        return _TRANSFORMS[self._transform][1](outputs * self._spread + self._center)

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return mean absolute, root mean squared and mean signed error, and R2 if the targets vary."""
        error, spread = (predictions - targets).double(), (targets - targets.mean()).double()
        metrics = {
            "mae": error.abs().mean().item(),
            "rmse": error.square().mean().sqrt().item(),
            "bias": error.mean().item(),
        }
        total = spread.square().sum().item()
        return {**metrics, "r2": 1 - error.square().sum().item() / total} if total else metrics


class ClassOutcome(TableOutcome):
    """One of some labels: two have one output, the logit of the second; more have one output each."""

    def __init__(self, target: str, labels: Labels, class_weights: Sequence[float] = ()):
        self._target, self._labels, self._is_binary = target, labels, len(labels) == 2
        self._class_weights = class_weights
        self.kind = "binary" if self._is_binary else "classes"
        self.outputs = 1 if self._is_binary else len(labels)
        self.metric = (
            Metric("auc", "", "max", may_be_undefined=True) if self._is_binary else Metric("accuracy", "", "max")
        )

    def read(self, table: Table) -> np.ndarray:
        """Return the number of each row's label.

        Raises:
            DataError: a label is none of the known ones.
        """
        position = number_labels(self._labels)
        labels = read_labels(table, self._target, position)
        found = sorted({label for label in labels if label})
        if set(found) - set(position):
            shown = ", ".join(found[:10]) + (", ..." if len(found) > 10 else "")
            raise DataError(
                f"{table.source}: column {self._target!r} has the labels {shown}, but the job knows "
                f"{', '.join(position)}. Set task.classes: {format_labels(found)} with the labels of all sites, in "
                "the same order at every site; of two, the second is class 1"
            )
        return np.array([[position.get(label, np.nan)] for label in labels])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy, the mean over examples with their weights."""
        if self._is_binary and not self._class_weights:
            return functional.binary_cross_entropy_with_logits(outputs, targets)
        logits = torch.cat([torch.zeros_like(outputs), outputs], dim=1) if self._is_binary else outputs
        return compute_cross_entropy(logits, targets[:, 0].long(), self._class_weights)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the probability of class 1, or of each class."""
        return torch.sigmoid(outputs) if self._is_binary else torch.softmax(outputs, dim=1)

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return accuracy, F1 and AUC of two classes; the accuracy of more, overall and balanced over the classes."""
        if self._is_binary:
            return compute_binary_metrics(predictions.flatten(), targets.flatten())
        hits = (predictions.argmax(dim=1) == targets[:, 0]).double()
        recalls = [hits[targets[:, 0] == label].mean().item() for label in targets[:, 0].unique()]
        return {"accuracy": hits.mean().item(), "balanced_accuracy": sum(recalls) / len(recalls)}


class SurvivalOutcome(TableOutcome):
    """The time of an event, or the time until which a subject was seen without one.

    The network's output is the logarithm of a relative hazard (Cox 1972). Predictions are that output, targets are the
    time and 1 for an event.
    """

    kind = "survival"
    metric = Metric("c_index", "", "max", may_be_undefined=True)

    def __init__(self, time: str, event: str):
        self._time, self._event = time, event

    def read(self, table: Table) -> np.ndarray:
        """Return times and events.

        Raises:
            DataError: a time is negative, or an event neither 0 nor 1.
        """
        times, events = table.get_numbers(self._time), table.get_numbers(self._event)
        if bool((times < 0).any()):
            row = int(np.flatnonzero(times < 0)[0])
            raise DataError(
                f"{table.source}: column {self._time!r} is {times[row]:g} (row {row + 1}); expected 0 or more"
            )
        known = events[np.isfinite(events)]
        if len(wrong := known[~np.isin(known, (0, 1))]):
            raise DataError(f"{table.source}: column {self._event!r} has {wrong[0]:g}; expected 1 for an event, else 0")
        return np.stack([times, events], axis=1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the negative logarithm of the partial likelihood within the batch, divided by its events.

        Breslow's form for tied times. The risk set of an event is that of its batch (Kvamme et al. 2019, JMLR 20:129,
        section 3.1): the larger the batch, the closer to the partial likelihood of the site.
        """
        return compute_cox_loss(outputs[:, 0], targets[:, 0], targets[:, 1])

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the logarithm of the relative hazard."""
        return outputs

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the share of events, and Harrell's C-index where two subjects can be compared."""
        metrics = {"event_rate": targets[:, 1].double().mean().item()}
        c_index = compute_c_index(predictions[:, 0], targets[:, 0], targets[:, 1])
        return metrics if c_index is None else {**metrics, "c_index": c_index}


def compute_cox_loss(log_hazard: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Return the mean over events of ``log(sum of hazards at risk) - log hazard``; 0 without any event.

    Args:
        log_hazard: ``(B,)``.
        times: ``(B,)``.
        events: ``(B,)`` 1 for an event, 0 for the end of the observation.
    """
    at_risk = times[None, :] >= times[:, None]
    total = torch.logsumexp(torch.where(at_risk, log_hazard[None, :], -torch.inf), dim=1)
    # A batch without any event teaches nothing, but its loss must have a gradient.
    return ((total - log_hazard) * events).sum() / events.sum().clamp(min=1)


def compute_c_index(log_hazard: Tensor, times: Tensor, events: Tensor) -> float | None:
    """Return the share of comparable pairs in which the subject with the earlier event has the higher hazard.

    Harrell et al. 1982, JAMA 247:2543; equal hazards count half. A pair is comparable if the earlier time is that of an
    event, or, of two equal times, one is that of an event. None without such a pair.
    """
    concordant, comparable = 0.0, 0
    # Some subjects with an event at a time: all pairs of a large site do not fit into memory.
    for rows in (events > 0.5).nonzero().flatten().split(max(PAIRS_AT_ONCE // max(len(times), 1), 1)):
        own = times[rows, None]
        later = (times > own) | ((times == own) & (events <= 0.5))
        gap = log_hazard[rows, None] - log_hazard
        concordant += int(((gap > 0) & later).sum()) + 0.5 * int(((gap == 0) & later).sum())
        comparable += int(later.sum())
    return concordant / comparable if comparable else None
