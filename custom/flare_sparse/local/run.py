"""Run a method in one process: every message still goes through the wire and is counted. FLARE must match its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..checkpoint.store import Store
from ..encryption import KeyContexts, ServerCipher, SiteCipher
from ..endpoints.server import SERVER, Attempt, ServerEndpoint
from ..endpoints.site import SiteEndpoint
from ..errors import WireError
from ..federation import Federation, Outcome, Reply, RoundRecord, RoundRules
from ..mask import Mask
from ..methods import Method
from ..seeds import limit_threads
from ..task import Metric
from ..training import Site, TrainingConfig
from ..wire.ledger import Ledger
from ..wire.plan import ValueType


def run_locally(
    method: Method[Any],
    weights: Tensor,
    sites: Mapping[str, Site],
    metric: Metric,
    *,
    values: ValueType = "float32",
    run: str = "0" * 16,
    rules: RoundRules | None = None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    ledger: Ledger | None = None,
    thread_count: int = 1,
    stores: Callable[[str], Store | None] = lambda end: None,
    resume: bool = False,
    contexts: KeyContexts | None = None,
) -> tuple[Outcome, Ledger]:
    """Run ``method`` from ``weights`` over ``sites`` in this process, through the real wire.

    ``stores`` says where the server (``"server"``) and each site keep their checkpoints, ``resume`` goes on from them.
    With ``contexts`` weights are encrypted: each end gets its own.

    Returns:
        The outcome and the ledger of every message.
    """
    ledger = Ledger() if ledger is None else ledger
    server = ServerEndpoint(method.layout, run, values, ledger, ServerCipher(contexts.server) if contexts else None)
    cipher = SiteCipher(contexts.client) if contexts else None
    endpoints = {
        name: SiteEndpoint(site, method, run, values, stores(name), cipher) for name, site in sorted(sites.items())
    }
    federation = Federation(method, server, metric, rules, on_round, stores(SERVER))
    with limit_threads(thread_count):
        outcome = federation.run(
            weights,
            lambda: sorted(endpoints),
            lambda q: dict(deliver(q, server, endpoints)),
            handshake=lambda names: {name: endpoints[name].build_hello() for name in names},
            resume=resume,
        )
    return outcome, ledger


def deliver(
    question: Attempt, server: ServerEndpoint, endpoints: Mapping[str, SiteEndpoint]
) -> Iterator[tuple[str, Reply]]:
    """A question to each site that it is for, and the answers back, without a framework in between."""
    for name, message in question.messages.items():
        endpoint = endpoints[name]
        try:
            request = endpoint.receive(message)
            update = endpoint.answer(request)
            answer = endpoint.encode(request, update).data
            yield name, server.decode(name, answer, update.num_examples, update.metrics)
        except WireError as error:
            yield name, error


def train_pooled(site: Site, weights: Tensor, config: TrainingConfig, rounds: int) -> Tensor:
    """Training on all data in one place, ``(P,)``: the upper bound, with the rounds and epochs of the others."""
    everything = Mask.full(site.layout.size)
    with limit_threads(1):
        for t in range(1, rounds + 1):
            weights = site.train(weights, everything, config, t)
    return weights
