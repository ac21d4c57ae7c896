"""Losses and metrics of classifiers."""

from collections.abc import Sequence
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from ..core.needs import Need, Needs
from ..core.ranking import BINS, compute_auc, compute_average_precision, find_bins
from .task import TaskConfig


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
    """Refuse class weights whose number is not that of the classes.

    Raises:
        ValueError: the number of weights is not that of the classes.
    """
    if class_weights and len(class_weights) != classes:
        raise ValueError(f"class_weights has {len(class_weights)} numbers for {classes} classes; give one for each")


class ClassesConfig(TaskConfig):
    """Classes from 0, and their weights."""

    classes: int = Field(2, ge=2, le=10_000)
    """number of classes"""
    class_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """weight of an example in the loss, by class; empty: 1. Constants of the job, as [1, 4]"""

    @model_validator(mode="after")
    def _check_class_weights(self) -> Self:
        check_class_weights(self.class_weights, self.classes)
        return self

    def needs(self) -> Needs:
        return list_weight_needs(self.class_weights)


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


def compute_risk_metrics(risk: Tensor, classes: Tensor) -> dict[str, float]:
    """Return :func:`compute_binary_metrics`, and how far the predicted risks are right.

    * ``auc_pr``: average precision; omitted if only one class is present;
    * ``brier``: mean squared error of the risk;
    * ``calibration_error``: mean distance between risk and share of class 1 over ten bins of equal width, weighted by
      the number of examples.

    Args:
        risk: predicted probability of class 1, ``(n,)``.
        classes: true class, 0 or 1, ``(n,)``.
    """
    metrics, risk, classes = compute_binary_metrics(risk, classes), risk.double(), classes.double()
    metrics["brier"] = (risk - classes).square().mean().item()
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, find_bins(risk), risk - classes)
    metrics["calibration_error"] = float(gaps.abs().sum() / len(risk))
    if "auc" in metrics:
        metrics["auc_pr"] = compute_average_precision(risk, classes)
    return metrics
