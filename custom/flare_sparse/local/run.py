"""Run a method in one process: every message still goes through the wire and is counted. FLARE must match its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..checkpoint.store import Store
from ..encryption import Contexts, ServerCipher, SiteCipher
from ..endpoints.server import SERVER, Question, ServerDesk
from ..endpoints.site import SiteDesk
from ..errors import WireError
from ..federation import Federation, Outcome, Reply, RoundRecord, Rules
from ..mask import Mask
from ..methods import Method
from ..seeds import threads
from ..task import Metric
from ..training import Site, TrainingConfig
from ..wire.ledger import Ledger
from ..wire.plan import ValueType


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
