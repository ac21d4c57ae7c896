"""Run a method in one process: every message still goes through the wire and is counted. FLARE must match its bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .checkpoint.store import Store
from .encryption import Contexts, ServerCipher, SiteCipher
from .errors import WireError
from .federation import Federation, Outcome, Reply, RoundRecord, Rules
from .mask import Mask
from .methods import Method
from .params import Layout
from .server import Question, ServerDesk
from .site import SiteDesk
from .structure import narrowed
from .task import Metric, Task
from .training import Site, TrainingConfig, Used
from .training.seeds import generator, seeded, threads
from .training.site import WATCHED
from .wire.ledger import Ledger
from .wire.plan import ValueType

SERVER = "server"
"""What the server's end is called among those that keep checkpoints."""


def initial_weights(task: Task, seed: int) -> tuple[Layout, Tensor]:
    """The layout of the task's model and its initial vector ``(P,)``, drawn from the run's seed."""
    with seeded(seed):
        module = task.model()
    layout = Layout.of(module)
    return layout, layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))


def rehearse(
    method: Method[Any],
    weights: Tensor,
    sites: Mapping[str, Site],
    metric: Metric,
    *,
    values: ValueType = "float32",
    run: str = "0" * 16,
    rules: Rules | None = None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    ledger: Ledger | None = None,
    thread_count: int = 1,
    stores: Callable[[str], Store | None] = lambda end: None,
    resume: bool = False,
    contexts: Contexts | None = None,
) -> tuple[Outcome, Ledger]:
    """Run ``method`` from ``weights`` over ``sites`` in this process, through the real wire.

    ``stores`` says where the server (``"server"``) and each site keep their checkpoints, ``resume`` goes on from them.
    With ``contexts`` weights are encrypted: each end gets its own.

    Returns:
        The outcome and the ledger of every message.
    """
    ledger = Ledger() if ledger is None else ledger
    server = ServerDesk(method.layout, run, values, ledger, ServerCipher(contexts.server) if contexts else None)
    cipher = SiteCipher(contexts.client) if contexts else None
    desks = {name: SiteDesk(site, method, run, values, stores(name), cipher) for name, site in sorted(sites.items())}
    federation = Federation(method, server, metric, rules, on_round, stores(SERVER))
    with threads(thread_count):
        outcome = federation.run(
            weights,
            lambda: sorted(desks),
            lambda q: dict(carry(q, server, desks)),
            greet=lambda names: {name: desks[name].hello() for name in names},
            resume=resume,
        )
    return outcome, ledger


def carry(question: Question, server: ServerDesk, desks: Mapping[str, SiteDesk]) -> Iterator[tuple[str, Reply]]:
    """A question to each site that it is for, and the answers back, without a framework in between."""
    for name, message in question.messages.items():
        desk = desks[name]
        try:
            request = desk.receive(message)
            update = desk.answer(request)
            answer = desk.encode(request, update).data
            yield name, server.decode(name, answer, update.examples, update.metrics)
        except WireError as error:
            yield name, error


def pooled(site: Site, weights: Tensor, config: TrainingConfig, rounds: int) -> Tensor:
    """Training on all data in one place, ``(P,)``: the upper bound, with the rounds and epochs of the others."""
    everything = Mask.full(site.layout.size)
    with threads(1):
        for t in range(1, rounds + 1):
            weights = site.train(weights, everything, config, t)
    return weights


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
