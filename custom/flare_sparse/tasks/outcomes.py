"""What the generic table task predicts: a number, one of two classes or one of several; times are in ``survival``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

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

_TRANSFORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "none": (lambda values: values, lambda values: values),
    "log": (torch.log, torch.exp),
    "log1p": (torch.log1p, torch.expm1),
}
"""Transforms of a target and their inverses."""


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
