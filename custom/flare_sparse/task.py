"""Task: what a site brings. Core and methods know this file only; ready tasks are in ``tasks/``."""

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
    """Base of a task's settings; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Metric:
    """The figure a task is judged by: its key in the metrics, its unit, and which way is better."""

    name: str
    unit: str
    mode: Literal["min", "max"]

    def is_better(self, new: float, old: float) -> bool:
        return new < old if self.mode == "min" else new > old


@dataclass(frozen=True)
class SiteData:
    """Where one site's examples lie. Set at the site, never in the job.

    Attributes:
        site: name of the site.
        path: folder or file.
        subset: identifiers of the examples that belong to the site; None for all of them.
        methods: by method's name, settings that the site chooses for itself where the method lets it.
    """

    site: str
    path: Path
    subset: tuple[str, ...] | None = None
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Examples:
    """A site's training and test examples. ``skipped`` counts those left out because they cannot be used."""

    train: Dataset[Any]
    test: Dataset[Any]
    skipped: int = 0

    @property
    def n_train(self) -> int:
        return len(self.train)  # type: ignore[arg-type]

    @property
    def n_test(self) -> int:
        return len(self.test)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Cohort:
    """What the simulator's partitioners need to know of a data set: one entry per example.

    Attributes:
        ids: identifiers, unique.
        columns: per example, such as ``site``, ``age``, ``label``; strings or numbers.
    """

    ids: tuple[str, ...]
    columns: dict[str, np.ndarray]


class Task(ABC):
    """One learning problem, the same on the server and on every site.

    A user's own task subclasses this in a module of theirs (docs/own-task.md). The server only calls ``model()``;
    ``load`` runs at a site and nothing of what it returns leaves it.

    Attributes:
        Config: its settings.
        metric: the figure that rounds and models are compared by.
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    metric: ClassVar[Metric]

    def __init__(self, config: TaskConfig | Mapping[str, Any] | None = None):
        self.config = config if isinstance(config, TaskConfig) else self.Config.model_validate(config or {})

    @abstractmethod
    def model(self) -> nn.Module:
        """A freshly initialised network (float32). Random numbers come from torch's global generator."""

    @abstractmethod
    def load(self, data: SiteData, seed: int) -> Examples:
        """The site's examples, split into train and test; the split depends on ``seed`` only.

        Raises:
            DataError: the data is missing or unusable; the message names files and fields.
        """

    def cohort(self, path: Path) -> Cohort:
        """The index of a data set, for the simulator to split into sites; nothing else calls it.

        Raises:
            DataError: there is no such data set.
            NotImplementedError: the task cannot be split by the simulator.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cohort(); give each simulated site its own folder")

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss over one batch, a scalar."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Predictions and targets of one batch, both with the batch as first dimension, in the metric's unit."""

    @abstractmethod
    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Figures over all test examples; ``metric.name`` must be among them."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a trained model into ``folder`` in the form that others open: here ``model.safetensors``, its state.

        Integers (counters, tables of positions) are made with the network and left out.
        """
        folder.mkdir(parents=True, exist_ok=True)
        state = {n: v.contiguous() for n, v in model.state_dict().items() if v.is_floating_point()}
        safetensors.torch.save_file(state, folder / "model.safetensors")

    def evaluate(self, model: nn.Module, test: Dataset[Any], batch_size: int = 16) -> dict[str, float]:
        """``metrics`` over a data set, with the model in evaluation mode; empty for an empty data set."""
        if not len(test):  # type: ignore[arg-type]
            return {}
        was_training = model.training
        model.eval()
        with torch.no_grad():
            pairs = [self.predict(model, batch) for batch in DataLoader(test, batch_size=batch_size)]
        model.train(was_training)
        predictions, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return self.metrics(predictions, targets)


def iterate_minibatches(dataset: Dataset[Any], batch_size: int, make_generator: torch.Generator) -> Iterator[Any]:
    """One pass over the data in random order; the last batch may be smaller."""
    yield from DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=make_generator)
