"""What the generic table task predicts: a number, one of two classes, one of several, or the time of an event."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import DataError
from ..core.names import find_similar
from .classes import compute_cross_entropy, compute_risk_metrics
from .data.features import Labels, format_labels, name_labels, number_labels, read_labels
from .data.tables import Table
from .task import Kind, Metric


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
    """A number, which the network sees as ``(value - center) / spread``."""

    kind = "regression"

    def __init__(self, target: str, unit: str, center: float, spread: float):
        self._target, self._center, self._spread = target, center, spread
        self.metric = Metric("mae", unit, "min")

    def read(self, table: Table) -> np.ndarray:
        """Return the numbers in the target's column."""
        return table.get_numbers(self._target)[:, None]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the smooth L1 error of the standardised value."""
        return functional.smooth_l1_loss(outputs, self.standardise(targets))

    def standardise(self, targets: Tensor) -> Tensor:
        """Return targets in the network's units."""
        return (targets - self._center) / self._spread

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the values in the target's own unit."""
        return outputs * self._spread + self._center

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
            is_merged = len(position) > len(self._labels)
            classes = ", ".join(f"{name}: [...]" for name in name_labels(self._labels))
            remedy = f"{{{classes}}}" if is_merged else format_labels(found)
            if self._is_binary and not is_merged and len(found) > 2:
                remedy = "{no: [...], yes: [...]}, or task.kind: classes,"
            unknown = next(label for label in found if label not in position)
            similar = find_similar(unknown, position)
            both = f" ({unknown!r} is not {similar!r}: names are compared character by character)" if similar else ""
            raise DataError(
                f"{table.source}: column {self._target!r} has the labels {shown}{both}, but the job knows "
                f"{', '.join(position)}. Set task.classes: {remedy} with the labels of all sites, in the same order "
                "at every site; of two, the second is class 1"
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
        """Return the metrics of risks for two classes; the accuracy of more, overall and balanced over the classes."""
        if self._is_binary:
            return compute_risk_metrics(predictions.flatten(), targets.flatten())
        hits = (predictions.argmax(dim=1) == targets[:, 0]).double()
        recalls = [hits[targets[:, 0] == label].mean().item() for label in targets[:, 0].unique()]
        return {"accuracy": hits.mean().item(), "balanced_accuracy": sum(recalls) / len(recalls)}


PAIRS_AT_ONCE = 2**20
"""Pairs of subjects that a C-index compares at a time."""


class SurvivalOutcome(TableOutcome):
    """The time of an event, or the time until which a subject was seen without one.

    Targets are the time and 1 for an event; a prediction is the logarithm of a relative hazard.

    Args:
        time: column of the times.
        event: column with 1 for an event.
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
        if len(rows := np.flatnonzero(times < 0)):
            raise DataError(
                f"{table.source}: column {self._time!r} is {times[rows[0]]:g} (row {rows[0] + 1}); expected 0 or more"
            )
        known = events[np.isfinite(events)]
        if len(wrong := known[~np.isin(known, (0, 1))]):
            raise DataError(f"{table.source}: column {self._event!r} has {wrong[0]:g}; expected 1 for an event, else 0")
        return np.stack([times, events], axis=1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the negative logarithm of Cox's partial likelihood, per event of the batch.

        The risk set of an event is that of its batch (Kvamme et al. 2019, JMLR 20:129, section 3.1): the larger the
        batch, the closer to the partial likelihood of the site.
        """
        return compute_cox_loss(outputs[:, 0], targets[:, 0], targets[:, 1])

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the log-hazard ``(B, 1)``."""
        return outputs

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the share of events, and Harrell's C-index where two subjects can be compared."""
        times, events = targets[:, 0], targets[:, 1]
        metrics = {"event_rate": events.double().mean().item()}
        if (c_index := compute_c_index(predictions[:, -1], times, events)) is not None:
            metrics["c_index"] = c_index
        return metrics


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
    # Process subjects with an event in chunks: all pairs of a large site do not fit into memory.
    for rows in (events > 0.5).nonzero().flatten().split(max(PAIRS_AT_ONCE // max(len(times), 1), 1)):
        own = times[rows, None]
        later = (times > own) | ((times == own) & (events <= 0.5))
        gap = log_hazard[rows, None] - log_hazard
        concordant += int(((gap > 0) & later).sum()) + 0.5 * int(((gap == 0) & later).sum())
        comparable += int(later.sum())
    return concordant / comparable if comparable else None
