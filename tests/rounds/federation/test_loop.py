"""Rounds of a run: quorum, retries, lost bases, quarantine and commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from local_federation import LocalFederation, Upload

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import CheckpointError, RoundFailed
from flare_sparse.core.params import compute_digest
from flare_sparse.rounds.endpoints.events import SERVER
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.rounds.local.run import Transport, run_locally


class Loop(LocalFederation):
    """A local federation whose ``tamper`` changes every message on its way to the server."""

    def __init__(self, bench: Any, name: str = "fedsparsify", rules: RoundRules | None = None, **settings: Any):
        self.store: Store | None = None
        stores = lambda end: self.store if end == SERVER else None  # noqa: E731
        super().__init__(name, bench, rules=rules, stores=stores, **settings)
        self.tamper: Callable[[int, str, Any], Any] = lambda sequence, site, message: message
        self.change_message = self._tamper

    def _tamper(self, upload: Upload) -> Upload | None:
        sent = [upload.message, upload.examples, upload.metrics]
        changed = self.tamper(upload.attempt.sequence, upload.site, sent)
        if changed is None:
            return None
        message, examples, metrics = changed
        return replace(upload, message=message, examples=examples, metrics=metrics)


def bench() -> Any:
    return toy.ToyBench()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedsparsify", "neurosfl"])
def test_site_that_lost_its_base_is_sent_the_full_model_in_the_same_round(name: str) -> None:
    loop = Loop(bench(), name)
    loop.restarts = {(3, "site-2")}
    outcome = loop.run()
    assert all(record.sites_contributed == ["site-1", "site-2", "site-3"] for record in outcome.rounds)
    assert compute_digest(outcome.weights) == compute_digest(Loop(bench(), name).run().weights)


def test_round_below_the_quorum_is_retried_and_then_stops_the_run() -> None:
    loop = Loop(bench(), rules=RoundRules(min_sites=3, retries=2))
    loop.tamper = lambda q, site, sent: None if site == "site-3" and q in (2, 3) else sent
    outcome = loop.run()
    assert outcome.rounds[1].attempts == 3
    assert compute_digest(outcome.weights) == compute_digest(Loop(bench()).run().weights)
    loop = Loop(bench(), rules=RoundRules(min_sites=3, retries=1))
    loop.tamper = lambda q, site, sent: None if site == "site-3" else sent
    with pytest.raises(RoundFailed, match=r"2 of 3 sites contributed.*timed out: site-3"):
        loop.run()


def test_zero_contributions_never_meet_the_quorum() -> None:
    loop = Loop(bench(), rules=RoundRules(min_sites=1, retries=0))
    loop.tamper = lambda *_: None
    with pytest.raises(RoundFailed, match="0 of 3"):
        loop.run()


@pytest.mark.slow
@pytest.mark.parametrize("values", ["bfloat16", "float16"])
def test_16_bit_formats_halve_the_bytes_and_end_near_float32(values: str) -> None:
    made = bench()
    exact, dense = run_locally(made.method("fedavg"), made.weights, made.sites(), made.task.metric)
    short, half = run_locally(
        made.method("fedavg"), made.weights, made.sites(), made.task.metric, transport=Transport(values=values)
    )
    assert {line.values for line in half.lines if line.scalars_sent} == {values}
    assert 2 * max(line.payload_bytes for line in half.lines) <= max(line.payload_bytes for line in dense.lines) + 144
    assert torch.allclose(short.weights, exact.weights, atol=0.05)


def test_round_below_the_quorum_by_weight_is_retried_and_then_stops_the_run() -> None:
    """site-1 and site-2 have 56 of 96 examples."""
    loop = Loop(bench(), rules=RoundRules(min_weight=0.6, retries=1))
    loop.tamper = lambda q, site, sent: None if site == "site-3" and q == 2 else sent
    assert loop.run().rounds[1].attempts == 2
    loop = Loop(bench(), rules=RoundRules(min_weight=0.6, retries=1))
    loop.tamper = lambda q, site, sent: None if site == "site-3" and q > 1 else sent
    with pytest.raises(RoundFailed, match="with 60% of the examples"):
        loop.run()
    assert [record.sites_contributed for record in loop.records] == [["site-1", "site-2", "site-3"]]


def test_absent_site_is_quarantined_and_every_site_asked_has_one_outcome() -> None:
    loop = Loop(bench(), rules=RoundRules(quarantine_after=2), rounds=8)
    loop.tamper = lambda q, site, sent: None if site == "site-3" and q < 6 else sent
    rounds = loop.run().rounds
    assert all(record.is_balanced for record in rounds)
    assert [record.timed_out for record in rounds[:4]] == [["site-3"], ["site-3"], [], ["site-3"]]
    assert [record.quarantined for record in rounds] == [[], [], ["site-3"], [], ["site-3"], ["site-3"], [], [], []]
    assert rounds[6].sites_contributed == ["site-1", "site-2", "site-3"]


def test_round_in_which_every_site_fails_is_retried_and_leaves_no_trace_in_the_model() -> None:
    loop = Loop(bench())
    loop.tamper = lambda q, site, sent: [sent[0][:-8], *sent[1:]] if q == 2 else sent
    outcome = loop.run()
    assert outcome.rounds[1].attempts == 2
    assert compute_digest(outcome.weights) == compute_digest(Loop(bench()).run().weights)


@pytest.mark.long
def test_order_of_arrival_does_not_change_a_bit_of_the_model() -> None:
    """Fifty orders of eight sites end in one model; sums in the order of arrival would not."""
    import random

    digests = set()
    for order in range(50):
        loop = LocalFederation("fedavg", bench(), sites=8, rounds=1)
        loop.order = list(loop.endpoints)
        random.Random(order).shuffle(loop.order)
        outcome = loop.run()
        digests.add(compute_digest(outcome.weights))
    assert len(digests) == 1


def test_round_whose_checkpoint_cannot_be_written_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in round 2: the run stops, round 2 is not announced, and the run can be resumed from round 1."""
    loop = Loop(bench())
    store = Store(tmp_path / "server", {})
    save = store.save

    def full(number: int, content: Any) -> None:
        if number == 2:
            raise CheckpointError("no space left on device")
        save(number, content)

    monkeypatch.setattr(store, "save", full)
    loop.store = store
    with pytest.raises(CheckpointError):
        loop.run()
    assert [record.round for record in loop.records] == [1]
    monkeypatch.undo()
    again = Loop(bench())
    again.store = store
    outcome = again.run(resume=True)
    assert compute_digest(outcome.weights) == compute_digest(Loop(bench()).run().weights)
