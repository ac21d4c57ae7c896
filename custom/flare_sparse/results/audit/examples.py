"""The examples of a run as an attacker sees them: losses, predictions and gradients of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset

from ...core.errors import DataError
from ...tasks.task import Examples, Task

MAX_ENTRIES = 512
"""Entries of the last layers' gradients that are features; more would outnumber any site's examples."""
LAST_LAYERS = 2
"""Layers whose gradients are features entry by entry, as in FedSparsify."""


@dataclass(frozen=True)
class AuditedExamples:
    """Training and test examples of all sites, in the order of the sites' names, training examples first.

    Attributes:
        dataset: the examples.
        is_member: ``(n,)`` bool: trained the model.
        sites: ``(n,)`` name of the site.
    """

    dataset: Dataset[Any]
    is_member: np.ndarray
    sites: np.ndarray

    @classmethod
    def from_sites(cls, examples: Mapping[str, Examples]) -> AuditedExamples:
        """Join the examples of sites; validation examples, which chose a round, are neither.

        Raises:
            DataError: there are no training or no test examples.
        """
        parts, members, sites = [], [], []
        for site, own in sorted(examples.items()):
            for dataset, count, is_member in ((own.train, own.n_train, True), (own.test, own.n_test, False)):
                if count:
                    parts.append(dataset)
                    members += [is_member] * count
                    sites += [site] * count
        if len(set(members)) < 2:
            raise DataError("an audit needs training and test examples; the sites of the run have one kind only")
        return cls(ConcatDataset(parts), np.array(members), np.array(sites))


def compute_losses(task: Task, model: nn.Module, dataset: Dataset[Any]) -> np.ndarray:
    """Return the loss of each example alone, ``(n,)``, with the model in eval mode."""
    model.eval()
    with torch.no_grad():
        losses = [float(task.loss(model, batch)) for batch in task.iterate_batches(dataset, 1)]
    return np.array(losses, dtype=np.float64)


def compute_prediction_features(task: Task, model: nn.Module, dataset: Dataset[Any]) -> np.ndarray:
    """Return predictions, targets and their differences ``(n, d)``."""
    predictions, targets = (
        values.detach().cpu().double().flatten(1).numpy() if values.dim() > 1 else values.double().numpy()[:, None]
        for values in task.measure_all(model, dataset)
    )
    width = min(predictions.shape[1], targets.shape[1])
    return np.concatenate([predictions, targets, predictions[:, :width] - targets[:, :width]], axis=1)


def compute_gradient_features(task: Task, model: nn.Module, dataset: Dataset[Any]) -> np.ndarray:
    """Return the features ``(n, d)`` of the white-box attack.

    Gupta et al. 2021 (arXiv:2105.02866), section 3.2: prediction, label, error, norms of the gradients of all tensors,
    and the gradients of the last layers entry by entry, up to :data:`MAX_ENTRIES`.
    """
    model.eval()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    last = select_last_parameters(model)
    rows = []
    for batch in task.iterate_batches(dataset, 1):
        loss = task.loss(model, batch)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        by_parameter = dict(zip(map(id, parameters), gradients, strict=True))
        norms = [0.0 if g is None else float(g.double().norm()) for g in gradients]
        entries = [_flatten(by_parameter[id(parameter)], parameter) for parameter in last]
        # Norms of examples differ by orders of magnitude.
        row = [np.array([float(loss.detach())]), np.log(np.array(norms) + 1e-12), torch.cat(entries).numpy()]
        rows.append(np.concatenate(row))
    return np.concatenate([compute_prediction_features(task, model, dataset), np.stack(rows)], axis=1)


def select_last_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of the last layers, from the last one backwards while they fit."""
    layers = [[p for p in part.parameters(recurse=False) if p.requires_grad] for part in model.modules()]
    chosen: list[nn.Parameter] = []
    for layer in [parameters for parameters in layers if parameters][: -LAST_LAYERS - 1 : -1]:
        if sum(parameter.numel() for parameter in [*chosen, *layer]) > MAX_ENTRIES and chosen:
            break
        chosen += layer
    return chosen


def _flatten(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    values = torch.zeros_like(parameter) if gradient is None else gradient
    return values.detach().to_dense().double().flatten()[:MAX_ENTRIES]
