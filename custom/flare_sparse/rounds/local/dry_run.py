"""Dry run: a local run without data or training, to count the bytes of a job's messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ...compute.structure.removal import narrow_network
from ...core.errors import TaskFailed
from ...core.mask import Mask
from ...core.params import Layout
from ...core.seeds import make_generator
from ...methods.method import Method
from ...tasks.task import Metric
from ...training import SampleUsage, Site, Trainer, Training, TrainingConfig
from ...training.local_task import weigh_batches
from ...training.task_trainer import OBSERVED_BATCH
from ...wire.ledger import Ledger
from ..federation.records import Outcome
from .run import PLAIN, Course, Transport, run_locally


class DryTrainer(Trainer):
    """Computes without data, for counting bytes: training and gradients return noise of the right shape.

    Args:
        name: name of the site.
        layout: layout of the model.
        seed: seed of the noise.
        examples: number of training examples that the site pretends to have.

    Attributes:
        usages: sample usage behind each update: how many of the pretended examples a real site would have read, at
            least.
    """

    def __init__(self, name: str, layout: Layout, seed: int = 0, examples: int = 1):
        super().__init__(layout)
        self._name, self._seed, self._count = name, seed, examples
        self.usages: list[SampleUsage] = []
        generator = make_generator(seed, "dry", name)
        self._noise = torch.rand(layout.size, generator=generator).add_(0.5)
        # The steps are small, so that the values stay within every number format over hundreds of rounds.
        self._step = _draw_step(layout, generator)

    @property
    def num_examples(self) -> int:
        return self._count

    @property
    def usage(self) -> SampleUsage:
        return self.usages[-1] if self.usages else SampleUsage()

    def reset_usage(self) -> None:
        self.usages.append(SampleUsage())

    def _count_usage(self, size: int, batches: int | None, passes: int = 1) -> None:
        count = passes * math.ceil(self._count / size) if batches is None else batches
        previous = self.usages.pop() if self.usages else SampleUsage()
        self.usages.append(
            SampleUsage(max(previous.examples, min(self._count, count * size)), previous.batches + count)
        )

    def train(self, training: Training) -> Tensor:
        self._count_usage(training.config.batch_size, training.steps, training.config.epochs)
        return training.trainable.take(training.start + self._step)

    def step_in_stages(self, start: Tensor, stages: Sequence[Mask], config: TrainingConfig) -> Tensor:
        self._count_usage(config.batch_size, 1)
        return start + self._step

    def compute_gradients(
        self, weights: Tensor, batch_size: int, batches: int | None, t: int, *, batch_statistics: bool = True
    ) -> Iterator[tuple[Tensor, float]]:
        self._count_usage(batch_size, batches)
        for weight in islice(weigh_batches(self._count, batch_size, joins_last=False), batches or 1):
            yield self._noise.clone(), weight

    def collect_inputs(self, weights: Tensor, kind: type[nn.Module], limit: int | None = None) -> dict[str, Tensor]:
        """Return two rows of noise for each layer that has a buffer with a column for each input."""
        self._count_usage(OBSERVED_BATCH, None)
        generator = make_generator(self._seed, "dry inputs", self._name)
        assert self.layout.skeleton is not None
        layers = {name: layer for name, layer in self.layout.skeleton.named_modules() if isinstance(layer, kind)}
        widths = {name: next(layer.buffers()).shape[-1] for name, layer in layers.items()}
        return {name: torch.rand(min(2, self._count), n, generator=generator) for name, n in widths.items()}

    def narrow(self, live: Mask) -> DryTrainer:
        assert self.layout.skeleton is not None
        layout = Layout.from_module(narrow_network(self.layout.skeleton, live))
        smaller = DryTrainer(self._name, layout, self._seed, self._count)
        smaller.usages = self.usages
        return smaller

    def observe_units(self, weights: Tensor, nodes: Collection[str], callback: Callable[[str, Tensor], None]) -> None:
        """Count the usage only: without data there are no activations to observe."""
        self._count_usage(OBSERVED_BATCH, None)

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        return {}


def _draw_step(layout: Layout, generator: torch.Generator) -> Tensor:
    """Return a typical delta ``(P,)``: normal, divided in each layer by its number of inputs."""
    # Follow trained deltas: a weight moves less in a layer with many inputs, most of which are rarely active.
    step = torch.randn(layout.size, generator=generator) / 100
    for tensor, start in zip(layout.tensors, layout.offsets, strict=False):
        if len(tensor.shape) > 1 and tensor.size:
            step[start : start + tensor.size] /= tensor.size // tensor.shape[0]
    # Training moves running statistics and no other buffer.
    running = ("running_mean", "running_var")
    fixed = Mask.from_tensors(layout, lambda spec: spec.role == "buffer" and not spec.name.endswith(running))
    step[fixed.bits] = 0
    return step


def dry_run(
    method: Method[Any, Any], weights: Tensor, dry_sites: Mapping[str, Site], transport: Transport = PLAIN
) -> tuple[Outcome, Ledger]:
    """Count the messages of a whole run over given sites, whose :class:`DryTrainer` then holds the usage per update.

    Args:
        method: the method.
        weights: initial weights ``(P,)``.
        dry_sites: the sites, by name.
        transport: how messages travel.

    Returns:
        The outcome and the ledger; every message was really encoded.
    """
    course = Course(on_site_error=_raise_site_error)
    metric = Metric("none", "", "min")
    return run_locally(method, weights, dry_sites, metric, transport=transport, course=course)


def _raise_site_error(_: str, error: Exception) -> None:
    """Raise the error of a dry site: neither data nor a user task can be at fault."""
    # The advice of TaskFailed, to correct the task and to resume, does not apply.
    raise (error.__cause__ or error) if isinstance(error, TaskFailed) else error
