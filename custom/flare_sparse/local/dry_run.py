"""Runs without data and without training: what the messages of a job weigh."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..encryption import KeyContexts
from ..federation import Outcome
from ..mask import Mask
from ..methods import Method
from ..params import Layout
from ..seeds import make_generator
from ..structure import narrow_network
from ..task import Metric
from ..training import SampleUsage, Site, TrainingConfig
from ..training.site import OBSERVED_BATCH
from ..wire.ledger import Ledger
from ..wire.plan import ValueType
from .run import run_locally


class DrySite(Site):
    """A site without data: training and gradients are noise of the right shape, so that messages can be counted.

    Attributes:
        answers: what would have been read for each, had the site so many training examples; no less than that.
    """

    def __init__(self, name: str, layout: Layout, seed: int = 0, examples: int = 1):
        self.name, self.layout, self.seed, self._count = name, layout, seed, examples
        self.answers: list[SampleUsage] = []
        self.weights = torch.zeros(layout.size)
        self.memory = {}
        self._noise = torch.rand(layout.size, generator=make_generator(seed, "dry", name)).add_(0.5)

    @property
    def num_examples(self) -> int:
        return self._count

    @property
    def usage(self) -> SampleUsage:
        return self.answers[-1] if self.answers else SampleUsage()

    def reset_usage(self) -> None:
        self.answers.append(SampleUsage())

    def _use(self, size: int, batches: int | None, passes: int = 1) -> None:
        count = passes * math.ceil(self._count / size) if batches is None else batches
        before = self.answers.pop() if self.answers else SampleUsage()
        self.answers.append(SampleUsage(max(before.examples, min(self._count, count * size)), before.batches + count))

    def train(
        self,
        start: Tensor,
        trainable: Mask,
        config: TrainingConfig,
        t: int,
        *,
        steps: int | None = None,
        **_: Any,
    ) -> Tensor:
        self._use(config.batch_size, steps, config.epochs)
        return torch.where(trainable.bits, self._moved(start), start)

    def step_in_stages(self, start: Tensor, stages: Sequence[Mask], config: TrainingConfig) -> Tensor:
        self._use(config.batch_size, 1)
        return self._moved(start)

    def _moved(self, start: Tensor) -> Tensor:
        """Every entry another way, and so little that hundreds of rounds end in ordinary numbers."""
        return start + (self._noise - 1) / 100

    def compute_gradients(self, weights: Tensor, batch_size: int, batches: int | None, t: int) -> Iterator[Tensor]:
        self._use(batch_size, batches)
        for _ in range(batches or 1):
            yield self._noise.clone()

    def narrow(self, live: Mask) -> Site:
        if live.is_full:
            return self
        assert self.layout.skeleton is not None
        smaller = DrySite(
            self.name, Layout.from_module(narrow_network(self.layout.skeleton, live)), self.seed, self._count
        )
        smaller.answers = self.answers
        smaller.weights = live.take(self.weights)
        return smaller

    def remove_channels(self, closed: Mapping[str, Tensor]) -> tuple[Site, Mask]:
        return self, Mask.full(self.layout.size)

    def observe_units(self, weights: Tensor, nodes: Collection[str], see: Callable[[str, Tensor], None]) -> None:
        """Without data there is nothing to see."""
        self._use(OBSERVED_BATCH, None)

    def evaluate(self, weights: Tensor) -> dict[str, float]:
        return {}


def estimate(
    method: Method[Any], weights: Tensor, sites: int, values: ValueType, *, encrypted: bool = False
) -> tuple[Outcome, Ledger]:
    """The messages of a whole run, really encoded (encrypted with keys made up here) and counted, without data and
    without training.
    """
    dry = {name: DrySite(name, method.layout) for name in (f"site-{i}" for i in range(1, sites + 1))}
    return dry_run(method, weights, dry, values, encrypted=encrypted)


def dry_run(
    method: Method[Any], weights: Tensor, dry: Mapping[str, DrySite], values: ValueType, *, encrypted: bool = False
) -> tuple[Outcome, Ledger]:
    """The messages of a whole run over sites without data; afterwards these say what stood behind their answers."""
    contexts = KeyContexts.generate() if encrypted else None
    return run_locally(method, weights, dry, Metric("none", "", "min"), values=values, contexts=contexts)
