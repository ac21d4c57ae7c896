"""A task at one site: what the site's trainers share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.utils.data import Dataset

from ..core.params import Layout
from ..core.seeds import derive_seed, make_generator, seed_torch
from ..tasks.task import TEST_EXAMPLES, VALIDATION, Examples, Task
from .batches import iterate_pass, needs_joined_last
from .config import CPU, Hardware, TrainingConfig
from .flat import FlatModel
from .sample_usage import CountingDataset

Part = Literal["test", "validation"]


@dataclass(frozen=True, eq=False)
class LocalTask:
    """A task, one site's examples of it, and the network that they train.

    Attributes:
        name: name of the site in FLARE.
        task: computes loss and metrics.
        examples: the site's examples.
        seed: seed of the run.
        train_examples: the training examples, which are counted when they are read.
        model: the network.
    """

    name: str
    task: Task
    examples: Examples
    seed: int
    train_examples: CountingDataset
    model: FlatModel
    _joins_last: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def open(
        cls, name: str, task: Task, examples: Examples, layout: Layout, seed: int, hardware: Hardware = CPU
    ) -> Self:
        """Return a task with a network of its own; the layout leaves out the tensors that do not travel."""
        # The weights drawn here are overwritten before use; seeding within a context leaves the global generator alone.
        with seed_torch(0):
            model = _open_model(task.model(), layout, hardware)
        return cls(name, task, examples, seed, CountingDataset(examples.train), model)

    def replace_network(self, network: nn.Module) -> Self:
        """Return the task with another network, which shares the examples and the count of their use."""
        model = _open_model(network, Layout.from_module(network), self.model.hardware)
        return replace(self, model=model, _joins_last={})

    def make_generator(self, stream: str, *labels: object) -> torch.Generator:
        """Return the generator of one stream of this site's random numbers."""
        return make_generator(self.seed, stream, self.name, *labels)

    def seed_torch(self, stream: str, *labels: object) -> AbstractContextManager[None]:
        """Return a context in which torch draws the random numbers of one stream of this site."""
        return seed_torch(derive_seed(self.seed, stream, self.name, *labels))

    def joins_last(self, batch_size: int) -> bool:
        """Return whether a last minibatch of one example joins the one before it: the network cannot train on it.

        Raises:
            ConfigError, DataError: the network cannot train on any minibatch.
        """
        if batch_size not in self._joins_last:
            self._joins_last[batch_size] = bool(self.examples.n_train) and needs_joined_last(
                self.model, self.task, self.examples.train, batch_size, self.name
            )
        return self._joins_last[batch_size]

    def iterate_batches(self, config: TrainingConfig, order: torch.Generator, steps: int | None) -> Iterator[Any]:
        """Yield ``steps`` minibatches, or ``config.epochs`` passes; lazily, so that unused examples do not count."""
        if not self.examples.n_train:
            return iter(())
        passes = repeat(None) if steps is not None else repeat(None, config.epochs)
        # Before the caller loads its weights: the check runs the network once.
        joins_last = self.joins_last(config.batch_size)
        batches = chain.from_iterable(
            iterate_pass(
                self.train_examples,
                config.batch_size,
                order,
                joins_last=joins_last,
                collate=self.task.collate,
                workers=config.workers,
            )
            for _ in passes
        )
        return islice(batches, steps)

    def evaluate_parts(self, measure: Callable[[Part, Dataset[Any]], dict[str, float]]) -> dict[str, float]:
        """Return the metrics of the test examples, and of the validation examples with their prefix."""
        metrics: dict[str, float] = {}
        if count := self.examples.n_test:
            metrics = {**measure("test", self.examples.test), TEST_EXAMPLES: float(count)}
        if self.examples.validation is not None and (count := self.examples.n_validation):
            chosen_by = {**measure("validation", self.examples.validation), "examples": float(count)}
            metrics |= {f"{VALIDATION}{name}": value for name, value in chosen_by.items()}
        return metrics


def _open_model(network: nn.Module, layout: Layout, hardware: Hardware) -> FlatModel:
    model = FlatModel(network, layout, hardware)
    # Frees the network's initial parameters, which no training starts from.
    model.load(torch.zeros(layout.size))
    return model
