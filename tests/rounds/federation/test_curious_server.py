"""An honest but curious server: everything that it holds in a round, searched for the values of single sites."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from local_federation import LocalFederation, Upload
from numpy.typing import NDArray

from flare_sparse.privacy.secure_aggregation import collector, party
from flare_sparse.privacy.secure_aggregation.messages import bound_reply_bytes
from flare_sparse.privacy.secure_aggregation.rings import Ring, RingFormat
from flare_sparse.privacy.secure_aggregation.stage import SumExchange, SumRules
from flare_sparse.rounds.federation import rounds
from flare_sparse.rounds.federation.rounds import AttemptResult
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.steps import Step

SITES, BOUND = 4, 8.0
SGD = {"optimizer": "sgd", "lr": 0.01}
Floats = NDArray[np.float64]


def iterate_objects(*roots: Any) -> Iterator[Any]:
    """Yield every object that can be reached from some objects, without code."""
    seen, pending = set(), list(roots)
    while pending:
        found = pending.pop()
        if id(found) in seen or isinstance(found, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(found))
        yield found
        pending += gc.get_referents(found)


def list_vectors(objects: list[Any], size: int, ring: RingFormat) -> list[Floats]:
    """Return all vectors of ``size`` numbers in some objects: as floats, and as integers of the ring."""
    vectors: list[Floats] = []
    for found in objects:
        if isinstance(found, torch.Tensor) and found.numel() == size and found.dtype == torch.float32:
            vectors.append(found.detach().double().numpy().ravel())
        data = found if isinstance(found, bytes) else None
        if isinstance(found, np.ndarray) and found.dtype == np.uint8:
            data = found.tobytes()
        # Values lie at the end of a message or of a section, or fill all of it.
        if data is not None and len(data) >= ring.section_bytes:
            vectors.append(ring.decode(np.frombuffer(data[-ring.section_bytes :], np.uint8)))
        if data is not None and len(data) >= 4 * size:
            # Random bytes read as floats may be signalling NaNs.
            with np.errstate(invalid="ignore"):
                vectors.append(np.frombuffer(data[-4 * size :], "<f4").astype(np.float64))
    # What overflows in a norm is no weight either.
    return [vector for vector in vectors if np.isfinite(vector).all() and np.abs(vector).max() < 1e6]


def find_sites(vectors: list[Floats], trained: dict[str, Floats], examples: dict[str, int], model: Floats) -> set[str]:
    """Return the sites whose trained weights the server can compute from a vector, or from two, and the model."""
    deltas = {site: values - model for site, values in trained.items()}
    # Of the sum, a server subtracts whatever else it holds.
    vectors = vectors + [first - second for first in vectors for second in vectors if first is not second]
    found = set()
    for site, delta in deltas.items():
        weight = sum(examples.values()) / examples[site]
        read = (candidate for vector in vectors for candidate in (vector - model, vector, vector * weight))
        if any(np.linalg.norm(candidate - delta) < 0.01 * np.linalg.norm(delta) for candidate in read):
            found.add(site)
    return found


def dump_round(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[set[str], set[str]]:
    """Return the sites that a server can read after the replies of a round, and all sites."""
    rules = RoundRules(min_sites=3)
    federation = LocalFederation("fedavg", sites=SITES, rules=rules, rounds=1, training=SGD, **options)
    model = federation.bench.weights.double().numpy()
    trained: dict[str, Floats] = {}
    examples: dict[str, int] = {}
    found: set[str] = set()
    exchanges: list[SumExchange] = []
    learn, start = rounds.learn_from, SumExchange.__init__

    def record_update(upload: Upload) -> Upload:
        trained.setdefault(upload.site, upload.update.patch.values.double().numpy())
        examples[upload.site] = upload.examples
        return upload

    def record_exchange(exchange: SumExchange, *arguments: Any) -> None:
        exchanges.append(exchange)
        start(exchange, *arguments)

    def record_objects(result: AttemptResult, *arguments: Any) -> Any:
        messages = [message for _, _, message in federation.sum_messages]
        objects = [*iterate_objects(federation.server, result, exchanges, arguments[2]), *messages]
        plain_ring = RingFormat(np.zeros(model.size, bool), Ring(32, BOUND))
        vectors = list_vectors(objects, model.size, exchanges[0].collector.ring if exchanges else plain_ring)
        found.update(find_sites(vectors, trained, examples, model))
        return learn(result, *arguments)

    federation.change_update = record_update
    monkeypatch.setattr(rounds, "learn_from", record_objects)
    monkeypatch.setattr(SumExchange, "__init__", record_exchange)
    federation.run()
    return found, set(federation.sites)


def test_server_of_a_plain_run_holds_the_weights_of_every_site(monkeypatch: pytest.MonkeyPatch) -> None:
    found, sites = dump_round(monkeypatch)
    assert found == sites


def test_server_of_a_masked_run_holds_the_weights_of_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = dump_round(monkeypatch, stage=SumRules(BOUND))
    assert found == set()


def test_search_finds_every_site_of_a_masked_run_without_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself can fail the test above: with pads of zeros it reads all sites."""
    for module in (party, collector):
        monkeypatch.setattr(module, "draw_pad", lambda key, size: np.zeros(size, np.uint8))
    found, sites = dump_round(monkeypatch, stage=SumRules(BOUND))
    assert found == sites


def test_masked_message_of_alexnet3d_has_less_than_5_percent_beside_4_bytes_a_live_value() -> None:
    """At 95 % sparsity, with 131,988 live values: 4 bytes a value, 4 more for each of 1,408 in buffers, and 72."""
    live, buffers = 131_988, 1_408
    ring = RingFormat(np.arange(live) < buffers, Ring(32, BOUND))
    message = bound_reply_bytes(Step.VALUES, ring.section_bytes, 8)
    assert message == 4 * live + 4 * buffers + 72 == 533_656
    assert message <= 1.05 * 4 * live
