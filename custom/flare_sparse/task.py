"""Task: the interface between a learning problem and the package. Ready-made tasks are in ``tasks/``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class TaskConfig(BaseModel):
    """Base class of a task's settings; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Metric:
    """The metric that models are compared by: its key, its unit, and whether lower or higher is better."""

    name: str
    unit: str
    mode: Literal["min", "max"]

    def is_better(self, new: float, old: float) -> bool:
        """Return whether ``new`` is strictly better than ``old``."""
        return new < old if self.mode == "min" else new > old


@dataclass(frozen=True)
class SiteData:
    """Location of one site's examples. Set at the site, never in the job.

    Attributes:
        site: name of the site.
        path: folder or file.
        subset: identifiers of the site's examples; None for all examples of ``path``.
        methods: settings that the site chooses for itself, by name of the method.
    """

    site: str
    path: Path
    subset: tuple[str, ...] | None = None
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Examples:
    """A site's training and test examples; ``skipped`` counts unusable examples that are in neither."""

    train: Dataset[Any]
    test: Dataset[Any]
    skipped: int = 0

    @property
    def n_train(self) -> int:
        """Number of training examples."""
        return len(self.train)  # type: ignore[arg-type]

    @property
    def n_test(self) -> int:
        """Number of test examples."""
        return len(self.test)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Cohort:
    """Index of a data set, one item per example; the simulator partitions it into sites.

    Attributes:
        ids: unique identifiers.
        columns: per-example values such as ``site``, ``age``, ``label``; strings or numbers.
    """

    ids: tuple[str, ...]
    columns: dict[str, np.ndarray]


class Task(ABC):
    """One learning problem, the same on the server and at every site.

    A user task subclasses this class in the user's own module (docs/own-task.md). The server calls only ``model``;
    ``load`` runs at a site, and the examples that it returns stay there.

    Attributes:
        Config: class of the settings.
        metric: the metric that rounds and models are compared by.
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    metric: ClassVar[Metric]

    def __init__(self, config: TaskConfig | Mapping[str, Any] | None = None):
        self.config = config if isinstance(config, TaskConfig) else self.Config.model_validate(config or {})

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a newly initialised float32 network. Random numbers come from torch's global generator."""

    @abstractmethod
    def load(self, data: SiteData, seed: int) -> Examples:
        """Load the site's examples, split into training and test; the split depends on ``seed`` only.

        Raises:
            DataError: the data is missing or invalid; the message names files and fields.
        """

    def cohort(self, path: Path) -> Cohort:
        """Return the index of a data set; only the simulator calls it, to partition the examples into sites.

        Raises:
            DataError: the data set does not exist.
            NotImplementedError: the task does not support partitioning.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cohort(); give each simulated site its own folder")

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over one batch, a scalar."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of one batch in the metric's unit; the first dimension is the batch."""

    @abstractmethod
    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics over all test examples; ``metric.name`` must be among them."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a trained model to ``folder`` in a format that other tools read; by default ``model.safetensors``.

        Integer tensors (counters, position tables) are not saved: ``model`` creates them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: v.contiguous() for name, v in model.state_dict().items() if v.is_floating_point()}
        safetensors.torch.save_file(state, folder / "model.safetensors")

    def evaluate(self, model: nn.Module, test: Dataset[Any], batch_size: int = 16) -> dict[str, float]:
        """Return ``metrics`` over a data set, with the model in eval mode; empty for an empty data set."""
        if not len(test):  # type: ignore[arg-type]
            return {}
        was_training = model.training
        model.eval()
        with torch.no_grad():
            pairs = [self.predict(model, batch) for batch in DataLoader(test, batch_size=batch_size)]
        model.train(was_training)
        predictions, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return self.metrics(predictions, targets)


def iterate_minibatches(dataset: Dataset[Any], batch_size: int, generator: torch.Generator) -> Iterator[Any]:
    """Yield the minibatches of one pass over the data in random order; the last one may be smaller."""
    yield from DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator)
