"""Binary classification with one logit, and the metrics of classifiers."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.needs import Need, Needs
from ..core.ranking import compute_auc
from .task import Metric, Task


class BinaryTask(Task, ABC):
    """A network with one logit; batches are ``(inputs, class 0 or 1 as float (B, 1))`` (NeuroSFL, section 4.2)."""

    metric = Metric("accuracy", "", "max")
    kind = "binary"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the binary cross-entropy, a scalar."""
        inputs, classes = batch
        return functional.binary_cross_entropy_with_logits(model(inputs), classes)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the probability of class 1 and the true class, both ``(B, 1)``."""
        inputs, classes = batch
        return torch.sigmoid(model(inputs)), classes

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics of :func:`compute_binary_metrics`."""
        return compute_binary_metrics(predictions.flatten(), targets.flatten())


def compute_cross_entropy(logits: Tensor, classes: Tensor, class_weights: Sequence[float] = ()) -> Tensor:
    """Return the mean cross-entropy of a batch, a scalar.

    Args:
        logits: ``(B, C)``.
        classes: true classes ``(B,)``.
        class_weights: weight of an example by class, ``C`` numbers; empty: 1.
    """
    weights = logits.new_tensor(class_weights) if class_weights else None
    return functional.cross_entropy(logits, classes, weight=weights)


def list_weight_needs(class_weights: Sequence[float]) -> Needs:
    """Return what weights need: private training, which computes each record's loss alone, cannot read them.

    torch divides a batch's loss by the sum of its examples' weights, which for one record is its own.
    """
    if not class_weights:
        return frozenset()
    reason = "task.class_weights cancel out: the loss of one record is divided by its own weight"
    return frozenset({Need.JOINT_SUBJECTS.because(reason, "leave them out")})


def check_class_weights(class_weights: Sequence[float], classes: int) -> None:
    """Raises:
    ValueError: the number of weights is not that of the classes.
    """
    if class_weights and len(class_weights) != classes:
        raise ValueError(f"class_weights has {len(class_weights)} numbers for {classes} classes; give one for each")


def compute_binary_metrics(probabilities: Tensor, classes: Tensor) -> dict[str, float]:
    """Return accuracy and F1 of class 1 at threshold 0.5, and the area under the ROC curve.

    Undefined metrics are omitted: ``f1`` if class 1 is neither present nor predicted, ``auc`` if only one class is
    present.

    Args:
        probabilities: probability of class 1, ``(n,)``.
        classes: true class, 0 or 1, ``(n,)``.
    """
    positive, predicted = classes > 0.5, probabilities > 0.5
    metrics = {"accuracy": (positive == predicted).double().mean().item()}
    if bool((positive | predicted).any()):
        metrics["f1"] = 2 * int((positive & predicted).sum()) / (int(positive.sum()) + int(predicted.sum()))
    if 0 < int(positive.sum()) < len(positive):
        metrics["auc"] = compute_auc(probabilities, positive)
    return metrics
