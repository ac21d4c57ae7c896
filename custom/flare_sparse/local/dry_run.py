"""Runs without data and without training: what the messages of a job weigh."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..encryption import Contexts
from ..federation import Outcome
from ..mask import Mask
from ..methods import Method
from ..params import Layout
from ..seeds import generator
from ..structure import narrowed
from ..task import Metric
from ..training import Site, TrainingConfig, Used
from ..training.site import WATCHED
from ..wire.ledger import Ledger
from ..wire.plan import ValueType
from .run import rehearse


class DrySite(Site):
    """A site without data: training and gradients are noise of the right shape, so that messages can be counted.

    Attributes:
        answers: what would have been read for each, had the site so many training examples; no less than that.
    """

    def __init__(self, name: str, layout: Layout, seed: int = 0, examples: int = 1):
        self.name, self.layout, self.seed, self._count = name, layout, seed, examples
        self.answers: list[Used] = []
        self.weights = torch.zeros(layout.size)
        self.memory = {}
        self._noise = torch.rand(layout.size, generator=generator(seed, "dry", name)).add_(0.5)

    @property
    def examples(self) -> int:
        return self._count

    @property
    def used(self) -> Used:
        return self.answers[-1] if self.answers else Used()

    def reset_used(self) -> None:
        self.answers.append(Used())

    def _use(self, size: int, batches: int | None, passes: int = 1) -> None:
        count = passes * math.ceil(self._count / size) if batches is None else batches
        before = self.answers.pop() if self.answers else Used()
        self.answers.append(Used(max(before.examples, min(self._count, count * size)), before.batches + count))

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
        return torch.where(trainable.on, self._moved(start), start)

    def step_in_stages(self, start: Tensor, stages: Sequence[Mask], config: TrainingConfig) -> Tensor:
        self._use(config.batch_size, 1)
        return self._moved(start)

    def _moved(self, start: Tensor) -> Tensor:
        """Every entry another way, and so little that hundreds of rounds end in ordinary numbers."""
        return start + (self._noise - 1) / 100

    def gradients(self, weights: Tensor, batch_size: int, batches: int | None, t: int) -> Iterator[Tensor]:
        self._use(batch_size, batches)
        for _ in range(batches or 1):
            yield self._noise.clone()

    def narrowed(self, live: Mask) -> Site:
        if live.is_full:
            return self
        assert self.layout.skeleton is not None
        smaller = DrySite(self.name, Layout.of(narrowed(self.layout.skeleton, live)), self.seed, self._count)
        smaller.answers = self.answers
        smaller.weights = live.take(self.weights)
        return smaller

    def without_channels(self, closed: Mapping[str, Tensor]) -> tuple[Site, Mask]:
        return self, Mask.full(self.layout.size)

    def watch(self, weights: Tensor, nodes: Collection[str], see: Callable[[str, Tensor], None]) -> None:
        """Without data there is nothing to see."""
        self._use(WATCHED, None)

    def judge(self, weights: Tensor) -> dict[str, float]:
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
    contexts = Contexts.new() if encrypted else None
    return rehearse(method, weights, dry, Metric("none", "", "min"), values=values, contexts=contexts)
