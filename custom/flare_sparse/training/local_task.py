"""A task at one site: what the site's trainers share, and minibatches that batch normalisation can train on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice, repeat, tee
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from ..core.errors import ConfigError, DataError
from ..core.params import Layout
from ..core.reading import stack_examples
from ..core.seeds import derive_seed, make_generator, seed_torch
from ..tasks.task import Examples, Task
from .config import CPU, Hardware, TrainingConfig
from .flat import FlatModel
from .sample_usage import CountingDataset

_TOO_FEW_VALUES = "more than 1 value per channel"
"""Part of the text with which torch refuses to normalise a single value."""


def plan_batch_sizes(examples: int, batch_size: int, *, joins_last: bool) -> list[int]:
    """Return the sizes of the minibatches of one pass.

    >>> plan_batch_sizes(9, 4, joins_last=False), plan_batch_sizes(9, 4, joins_last=True)
    ([4, 4, 1], [4, 5])

    Args:
        examples: number of examples, at least 1.
        batch_size: examples per minibatch.
        joins_last: join a last minibatch of one example to the one before it.
    """
    sizes = [min(batch_size, examples - start) for start in range(0, examples, batch_size)]
    if joins_last and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


def weigh_batches(examples: int, batch_size: int, *, joins_last: bool) -> Iterator[float]:
    """Yield, without end, the weights of the minibatches of successive passes in a mean over examples.

    A minibatch weighs its number of examples, in units of the largest minibatch.
    """
    sizes = plan_batch_sizes(max(examples, 1), batch_size, joins_last=joins_last)
    return cycle([size / min(batch_size, sizes[0]) for size in sizes])


def iterate_pass(
    dataset: Any,
    batch_size: int,
    generator: torch.Generator,
    *,
    joins_last: bool,
    collate: Callable[[Sequence[Any]], Any] = stack_examples,
    workers: int = 0,
) -> Iterator[Any]:
    """Yield the minibatches of one pass in random order, of the sizes of :func:`plan_batch_sizes`.

    Args:
        dataset: the examples; a :class:`CountingDataset` with workers, which read ahead and count nothing.
        batch_size: examples per minibatch.
        generator: draws the order.
        joins_last: see :func:`plan_batch_sizes`.
        collate: makes a minibatch of examples.
        workers: processes that read the examples; 0: this one.
    """
    if joins_last:
        order = torch.randperm(len(dataset), generator=generator)
        batches: Iterable[Any] = map(
            Tensor.tolist, order.split(plan_batch_sizes(len(order), batch_size, joins_last=True))
        )
    else:
        batches = BatchSampler(RandomSampler(dataset, generator=generator), batch_size, drop_last=False)
    if not workers:
        yield from DataLoader(dataset, batch_sampler=batches, generator=generator, collate_fn=collate)
        return
    batches, read = tee(batches)
    loader = DataLoader(
        dataset.uncounted, batch_sampler=batches, generator=generator, collate_fn=collate, num_workers=workers
    )
    for batch, indices in zip(loader, read, strict=True):
        dataset.count(indices)
        yield batch


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
            self._joins_last[batch_size] = self._must_join_last(batch_size)
        return self._joins_last[batch_size]

    def _must_join_last(self, batch_size: int) -> bool:
        """Return whether a last minibatch has one value per channel, which batch normalisation refuses.

        The network's weights and statistics must be loaded again afterwards.
        """
        examples, parts = self.examples.n_train, self.model.module.modules()
        if not examples or plan_batch_sizes(examples, batch_size, joins_last=False)[-1] != 1:
            return False
        if not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts) or self._trains_on_one():
            return False
        if examples == 1:
            raise DataError(f"site {self.name}: one training example; batch normalisation needs at least 2 to train")
        if batch_size == 1:
            raise ConfigError("a batch size of 1 leaves batch normalisation one value per channel; choose 2 or more")
        return True

    def _trains_on_one(self) -> bool:
        """Return whether the network trains on a minibatch of one example."""
        self.model.set_training_mode()
        # Tried rather than derived from the layers: a convolution has one value per voxel, and one example can suffice.
        # The seed keeps the draws of this pass out of the streams of the training.
        with seed_torch(0), torch.no_grad():
            batch = next(self.task.iterate_batches(self.examples.train, 1))
            try:
                self.task.loss(self.model.module, self.model.to_device(batch))
            except ValueError as error:
                return _TOO_FEW_VALUES not in str(error)
        return True

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


def _open_model(network: nn.Module, layout: Layout, hardware: Hardware) -> FlatModel:
    model = FlatModel(network, layout, hardware)
    # Frees the network's initial parameters, which no training starts from.
    model.load(torch.zeros(layout.size))
    return model
