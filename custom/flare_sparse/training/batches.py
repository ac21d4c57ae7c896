"""Minibatches of one pass over the training examples, of a size that batch normalisation can train on."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, tee
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from ..core.errors import ConfigError, DataError
from ..core.reading import stack_examples
from ..core.seeds import seed_torch
from ..tasks.task import Task
from .flat import FlatModel

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


def needs_joined_last(model: FlatModel, task: Task, dataset: Dataset[Any], batch_size: int, site: str) -> bool:
    """Return whether the last minibatch of a pass has one example and the network cannot train on it.

    Batch normalisation of one value per channel is undefined, and torch refuses it.

    Args:
        model: the site's network; its weights and statistics must be loaded again afterwards.
        task: computes the loss.
        dataset: the training examples, at least one.
        batch_size: examples per minibatch.
        site: name of the site, for errors.

    Raises:
        DataError: there is one training example only.
        ConfigError: every minibatch has one example.
    """
    examples = len(dataset)  # type: ignore[arg-type]
    has_single = plan_batch_sizes(examples, batch_size, joins_last=False)[-1] == 1
    if not has_single or not _needs_two_examples(model, task, dataset):
        return False
    if examples == 1:
        raise DataError(f"site {site}: one training example; batch normalisation needs at least 2 to train")
    if batch_size == 1:
        raise ConfigError("a batch size of 1 leaves batch normalisation one value per channel; choose 2 or more")
    return True


def _needs_two_examples(model: FlatModel, task: Task, dataset: Dataset[Any]) -> bool:
    """Return whether the network refuses to train on a minibatch of one example."""
    if not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.module.modules()):
        return False
    model.set_training_mode()
    # Tried rather than derived from the layers: a convolution has one value per voxel, and one example can suffice.
    # The seed keeps the draws of this pass out of the streams of the training.
    with seed_torch(0), torch.no_grad():
        batch = next(task.iterate_batches(dataset, 1))
        try:
            task.loss(model.module, model.to_device(batch))
        except ValueError as error:
            return _TOO_FEW_VALUES in str(error)
    return False
