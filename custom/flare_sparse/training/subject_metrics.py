"""Metrics of single subjects, from which noisy means are released; a subject, such as a patient, may have several
records.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from ..core.errors import ConfigError
from ..core.params import Layout
from ..privacy.dp.account import BudgetSpent
from ..privacy.dp.metrics import MetricRelease
from ..tasks.task import Task
from .local_task import LocalTask, Part
from .trainer import Trainer, Wrapper


@dataclass(frozen=True)
class Subjects:
    """Records of each subject of a site.

    Attributes:
        records: positions of a subject's training examples, by subject.
        names: identifiers of the training examples, in order; part of what decides an answer.
    """

    records: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    @classmethod
    def group(cls, count: int, names: Sequence[str], subjects: Sequence[str]) -> Subjects:
        """Group training examples by subject.

        Args:
            count: number of training examples.
            names: their identifiers; empty: not known.
            subjects: the subject of each; empty: every example is a subject of its own.
        """
        records: dict[str | int, list[int]] = {}
        keys: Sequence[str | int] = subjects or range(count)
        for index, subject in enumerate(keys):
            records.setdefault(subject, []).append(index)
        return cls(tuple(map(tuple, records.values())), tuple(names))

    def __len__(self) -> int:
        return len(self.records)


_LOG = logging.getLogger(__name__)


class SilentTrainer(Wrapper):
    """Lets no metrics leave the site, and computes none."""

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        return {}

    def evaluate_subgroups(self, layout: Layout, weights: Tensor) -> dict[str, float]:
        return {}


class PrivateMetricsTrainer(Wrapper):
    """Adds noise to the metrics that leave the site.

    Args:
        inner: evaluates.
        local: the task, the site's examples and the network.
        metric_release: adds noise and charges the test and validation subjects.
    """

    def __init__(self, inner: Trainer, local: LocalTask, metric_release: MetricRelease):
        super().__init__(inner)
        self._local, self.metric_release, self._release = local, metric_release, metric_release

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        release, examples = self._release, self._local.examples

        def measure(part: Part, dataset: Dataset[Any]) -> dict[str, float]:
            is_test = part == "test"
            names = tuple(examples.test_ids if is_test else examples.validation_ids)
            owners = examples.test_subjects if is_test else examples.validation_subjects
            subjects = Subjects.group(examples.n_test if is_test else examples.n_validation, names, owners)
            network, bounds = self._local.model.module, list(release.bounds)
            values = evaluate_subjects(self._local.task, network, dataset, subjects.records, bounds)
            # Metrics are no reason to leave a round: without a budget for them, they stay here.
            try:
                return release.release(part, weights, names, values)
            except BudgetSpent as error:
                _LOG.warning("metrics stay at the site: %s", error)
                return {}

        self._local.model.load(weights)
        return self._local.evaluate_parts(measure)

    def evaluate_subgroups(self, layout: Layout, weights: Tensor) -> dict[str, float]:
        # The budget covers the metrics over all subjects alone.
        return {}


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
