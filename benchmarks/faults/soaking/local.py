"""The soak in one process over the real wire: faults occur at the site, in its message and on the way."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import parse_job
from flare_sparse.core.errors import WireError
from flare_sparse.core.seeds import limit_threads
from flare_sparse.rounds.endpoints.server import Attempt, ServerEndpoint
from flare_sparse.rounds.endpoints.site import SiteEndpoint
from flare_sparse.rounds.federation.loop import Federation
from flare_sparse.rounds.federation.records import RoundRecord
from flare_sparse.rounds.federation.roster import Connections
from flare_sparse.tasks.task import SiteData
from flare_sparse.wire import envelope
from flare_sparse.wire.envelope import read_header
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.stage import Reply

from .faulty import FAULTS, FaultyTask
from .figures import measure_memory, summarize


class FaultyTransport:
    """Delivers attempts to endpoints in this process; a share of the replies has a fault."""

    def __init__(self, endpoints: Mapping[str, SiteEndpoint], server: ServerEndpoint, share: float, seed: int):
        self._endpoints, self._server, self._share = endpoints, server, share
        self._random = random.Random(seed)

    def __call__(self, attempt: Attempt) -> dict[str, Reply]:
        replies = {site: self._reply(site, message) for site, message in attempt.messages.items()}
        return {site: reply for site, reply in replies.items() if reply is not None}

    def _reply(self, site: str, message: np.ndarray) -> Reply | None:
        fault = self._random.choice(FAULTS) if self._random.random() < self._share else "none"
        endpoint = self._endpoints[site]
        if fault == "raise":
            return "E_SITE"
        try:
            request = endpoint.receive(message)
            update = endpoint.answer(request)
            data = damage(endpoint.encode(request, update).data, fault)
            return None if fault == "late" else self._server.decode(site, data, update.num_examples, update.metrics)
        except WireError as error:
            return error


def damage(data: np.ndarray, fault: str) -> np.ndarray:
    """Return the message with a first value of NaN, or two values short, with valid checksums."""
    start = read_header(data).values_start
    if fault not in ("nan", "shape") or start == data.size:
        return data
    data = data[:-8].copy() if fault == "shape" else data.copy()
    if fault == "nan":
        data[start : start + 4] = np.array([np.nan], "<f4").view(np.uint8)
    envelope.write_checksums(data, start)
    return data


def soak(settings: dict[str, Any], sites: int, share: float) -> dict[str, Any]:
    """Run the job and return its figures."""
    began, lines, samples = time.monotonic(), [], []
    job = parse_job(settings, FaultyTask)
    assembly = assemble(job, FaultyTask({"faults": "none"}))
    ledger = Ledger()
    server = ServerEndpoint(assembly.layout, assembly.run_id, job.wire.values, ledger, seed=job.seed)
    names = [f"site-{i}" for i in range(1, sites + 1)]
    endpoints = {
        name: SiteEndpoint(
            open_site(assembly, SiteData(name, Path())), assembly.method, assembly.run_id, job.wire.values
        )
        for name in names
    }

    def record_round(record: RoundRecord) -> None:
        lines.append(asdict(record))
        samples.append(measure_memory())

    with limit_threads(1):
        federation = Federation(
            assembly.method,
            server,
            assembly.task.metric,
            Connections(lambda: sorted(endpoints), FaultyTransport(endpoints, server, share, job.seed)),
            rules=job.federation,
            on_round=record_round,
        )
        federation.run(assembly.weights)
    return summarize(lines, samples, time.monotonic() - began)
