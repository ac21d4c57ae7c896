"""Metrics of single subjects, from which noisy means are released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from ..core.errors import ConfigError
from ..tasks.task import Task


def evaluate_subjects(
    task: Task, network: nn.Module, dataset: Dataset[Any], records: Sequence[Sequence[int]], names: Sequence[str]
) -> Tensor:
    """Return the metrics ``(subjects, len(names))`` of each subject, computed from its own examples alone.

    Args:
        task: computes the metrics.
        network: the model.
        dataset: the examples.
        records: positions of the examples of each subject.
        names: names of the metrics.

    A metric that a subject has no value of is NaN.

    Raises:
        ConfigError: a metric is defined for no single subject, such as an AUC.
    """
    rows, defined = [], set[str]()
    for positions in records:
        metrics = task.evaluate(network, Subset(dataset, list(positions)))
        defined |= metrics.keys()
        rows.append([float(metrics.get(name, math.nan)) for name in names])
    if rows and (missing := [name for name in names if name not in defined]):
        raise ConfigError(
            f"privacy.metric_bounds: no metric {missing[0]!r} of a single subject; there are "
            f"{', '.join(sorted(defined))}"
        )
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(names))
