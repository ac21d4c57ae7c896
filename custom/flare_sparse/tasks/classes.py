"""Classes as a target: two by one logit, and the figures by which classifiers are judged."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..task import Metric, Task


class BinaryTask(Task, ABC):
    """A network with one logit; batches are (inputs, class 0 or 1 as float (B, 1)). NeuroSFL section 4.2."""

    metric = Metric("accuracy", "", "max")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Binary cross-entropy."""
        inputs, classes = batch
        return functional.binary_cross_entropy_with_logits(model(inputs), classes)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Probability of class 1 and the true class, both (B, 1)."""
        inputs, classes = batch
        return torch.sigmoid(model(inputs)), classes

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """As :func:`binary_figures`."""
        return binary_figures(predictions.flatten(), targets.flatten())


def binary_figures(probabilities: Tensor, classes: Tensor) -> dict[str, float]:
    """Accuracy and F1 of class 1 at threshold 0.5, and the area under the ROC curve.

    F1 is left out where class 1 is neither there nor predicted, the area where only one class is there.

    Args:
        probabilities: of class 1, ``(n,)``.
        classes: 0 or 1, ``(n,)``.
    """
    true, said = classes > 0.5, probabilities > 0.5
    figures = {"accuracy": (true == said).double().mean().item()}
    if bool((true | said).any()):
        figures["f1"] = 2 * int((true & said).sum()) / (int(true.sum()) + int(said.sum()))
    if 0 < int(true.sum()) < len(true):
        from monai.metrics import compute_roc_auc

        figures["auc"] = float(compute_roc_auc(probabilities, true.float()))
    return figures
