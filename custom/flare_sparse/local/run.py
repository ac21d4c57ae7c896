"""Run of a method in one process: every message is encoded, decoded and counted as in FLARE, with the same result."""

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
from ..methods import Method
from ..seeds import limit_threads
from ..task import Metric
from ..training import Site
from ..wire.ledger import Ledger
from ..wire.plan import ValueType


def run_locally(
    method: Method[Any, Any],
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
    """Run a method over sites in this process, through the real wire.

    Args:
        method: the method.
        weights: initial weights ``(P,)``.
        sites: sites by name.
        metric: metric that selects the best model.
        values: number format of the values in messages.
        run: run id, 16 hex digits.
        rules: rules that decide when a round is committed; None: the defaults.
        on_round: called with the record of each committed round.
        ledger: receives a line per message; None: a new ledger.
        thread_count: number of torch threads, which fixes the order of float sums.
        stores: returns the checkpoint store of an end (``"server"`` or a site's name); None: no checkpoints.
        resume: continue from the checkpoints in ``stores``.
        contexts: key contexts; if given, weights are encrypted, and each end receives only its own context.

    Returns:
        The outcome and the ledger.
    """
    ledger = Ledger() if ledger is None else ledger
    server = ServerEndpoint(method.layout, run, values, ledger, ServerCipher(contexts.server) if contexts else None)
    cipher = SiteCipher(contexts.client) if contexts else None
    endpoints = {
        name: SiteEndpoint(site, method, run, values, stores(name), cipher) for name, site in sorted(sites.items())
    }
    federation = Federation(
        method,
        server,
        metric,
        lambda: sorted(endpoints),
        lambda attempt: dict(deliver(attempt, server, endpoints)),
        rules=rules,
        handshake=lambda names: {name: endpoints[name].build_hello() for name in names},
        on_round=on_round,
        store=stores(SERVER),
    )
    with limit_threads(thread_count):
        outcome = federation.run(weights, resume=resume)
    return outcome, ledger


def deliver(
    attempt: Attempt, server: ServerEndpoint, endpoints: Mapping[str, SiteEndpoint]
) -> Iterator[tuple[str, Reply]]:
    """Deliver an attempt's requests to the sites; yield the reply of each site by name."""
    for name, message in attempt.messages.items():
        endpoint = endpoints[name]
        try:
            request = endpoint.receive(message)
            update = endpoint.answer(request)
            message_up = endpoint.encode(request, update).data
            yield name, server.decode(name, message_up, update.num_examples, update.metrics)
        except WireError as error:
            yield name, error
