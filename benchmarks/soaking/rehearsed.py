"""The soak over the wire in one process: faults strike at the site, in its message and on the way."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flare_sparse.assemble import assemble, build_rules, open_site
from flare_sparse.config import parse_job
from flare_sparse.endpoints.server import Attempt, ServerEndpoint
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.errors import WireError
from flare_sparse.federation import Federation, Reply, RoundRecord
from flare_sparse.seeds import limit_threads
from flare_sparse.task import SiteData
from flare_sparse.wire import envelope
from flare_sparse.wire.envelope import HEADER_BYTES, read_header
from flare_sparse.wire.ledger import Ledger

from .faulty import FAULTS, FaultyTask
from .figures import figures, resident_mb


class Lossy:
    """Carries questions to desks in this process; of every hundred answers ``100 * share`` meet a fault."""

    def __init__(self, endpoints: Mapping[str, SiteEndpoint], server: ServerEndpoint, share: float, seed: int):
        self._desks, self._server, self._share = endpoints, server, share
        self._lots = random.Random(seed)

    def __call__(self, question: Attempt) -> dict[str, Reply]:
        replies = {site: self._reply(site, message) for site, message in question.messages.items()}
        return {site: reply for site, reply in replies.items() if reply is not None}

    def _reply(self, site: str, message: np.ndarray) -> Reply | None:
        fault = self._lots.choice(FAULTS) if self._lots.random() < self._share else "none"
        endpoint = self._desks[site]
        if fault == "raise":
            return "E_SITE"
        try:
            request = endpoint.receive(message)
            update = endpoint.answer(request)
            data = broken(endpoint.encode(request, update).data, fault)
            return None if fault == "late" else self._server.decode(site, data, update.num_examples, update.metrics)
        except WireError as error:
            return error


def broken(data: np.ndarray, fault: str) -> np.ndarray:
    """A message whose first value is NaN, or that is two values short; its checksums hold."""
    start = read_header(data).values_start
    if fault not in ("nan", "shape") or start == data.size:
        return data
    data = data[:-8].copy() if fault == "shape" else data.copy()
    if fault == "nan":
        data[start : start + 4] = np.array([np.nan], "<f4").view(np.uint8)
    data[112:HEADER_BYTES] = np.frombuffer(envelope._CHECKS.pack(*envelope._checksums(data, start)), np.uint8)
    return data


def soak(settings: dict[str, Any], sites: int, share: float) -> dict[str, Any]:
    """Figures of a whole run."""
    began, lines, samples = time.monotonic(), [], []
    job = parse_job(settings, FaultyTask)
    assembly = assemble(job, FaultyTask({"faults": "none"}))
    ledger = Ledger()
    server = ServerEndpoint(assembly.layout, assembly.run_id, job.wire.values, ledger)
    names = [f"site-{i}" for i in range(1, sites + 1)]
    endpoints = {
        name: SiteEndpoint(
            open_site(assembly, SiteData(name, Path())), assembly.method, assembly.run_id, job.wire.values
        )
        for name in names
    }

    def committed(record: RoundRecord) -> None:
        lines.append(asdict(record))
        samples.append(resident_mb())

    with limit_threads(1):
        federation = Federation(assembly.method, server, assembly.task.metric, build_rules(job), committed)
        federation.run(assembly.weights, lambda: sorted(endpoints), Lossy(endpoints, server, share, job.seed))
    return figures(lines, samples, time.monotonic() - began)
