"""Rounds: what is rejected changes nobody else's result, what is lost is sent again, what is too little is not committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from flare_sparse.aggregation.weighted import average_over_owners, weigh_by_examples, weigh_equally, weighted_sum
from flare_sparse.checkpoint.store import Store
from flare_sparse.endpoints.server import ServerEndpoint
from flare_sparse.endpoints.site import SiteEndpoint
from flare_sparse.errors import CheckpointError, MissingBase, RejectedMessage, RoundFailed
from flare_sparse.exchange import Contribution, Patch, Update
from flare_sparse.federation import Federation, RoundRules
from flare_sparse.local.run import run_locally
from flare_sparse.mask import Mask
from flare_sparse.params import compute_digest
from flare_sparse.wire.ledger import Ledger

RUN = "0" * 16


class Loop:
    """A federation in this process, with a hand in every message."""

    def __init__(self, bench: Any, name: str = "fedsparsify", rules: RoundRules | None = None, **settings: Any):
        self.bench, self.method = bench, bench.method(name, **settings)
        self.server = ServerEndpoint(bench.layout, RUN, "float32", Ledger())
        self.endpoints = {n: SiteEndpoint(site, self.method, RUN, "float32") for n, site in bench.sites().items()}
        self.federation = Federation(self.method, self.server, bench.task.metric, rules)
        self.tamper: Callable[[int, str, Any], Any] = lambda sequence, site, reply: reply
        self.forget: set[tuple[int, str]] = set()

    def carry(self, question: Any) -> dict[str, Any]:
        replies: dict[str, Any] = {}
        for name, message in question.messages.items():
            if (question.sequence, name) in self.forget:
                self.endpoints[name] = SiteEndpoint(self.bench.sites()[name], self.method, RUN, "float32")
            endpoint = self.endpoints[name]
            try:
                request = endpoint.receive(message)
                update = endpoint.answer(request)
                sent = [endpoint.encode(request, update).data.copy(), update.num_examples, update.metrics]
                sent = self.tamper(question.sequence, name, sent)
                if sent is not None:
                    replies[name] = self.server.decode(name, *sent)
            except (RejectedMessage, MissingBase) as error:
                replies[name] = error
        return replies

    def run(self) -> Any:
        return self.federation.run(self.bench.weights, lambda: sorted(self.endpoints), self.carry)


def bench() -> Any:
    return toy.Bench()


@pytest.mark.parametrize("name", ["fedsparsify", "neurosfl"])
def test_a_site_that_lost_what_it_held_is_sent_everything_in_the_same_round(name: str) -> None:
    loop = Loop(bench(), name)
    loop.forget = {(3, "site-2")}
    outcome = loop.run()
    assert all(record.sites_contributed == ["site-1", "site-2", "site-3"] for record in outcome.rounds)
    assert compute_digest(outcome.weights) == compute_digest(Loop(bench(), name).run().weights)


def test_a_round_below_the_quorum_is_asked_again_and_then_stops_the_run() -> None:
    loop = Loop(bench(), rules=RoundRules(min_sites=3, retries=2))
    loop.tamper = lambda q, site, sent: None if site == "site-3" and q in (2, 3) else sent
    outcome = loop.run()
    assert outcome.rounds[1].attempts == 3
    assert compute_digest(outcome.weights) == compute_digest(Loop(bench()).run().weights)
    loop = Loop(bench(), rules=RoundRules(min_sites=3, retries=1))
    loop.tamper = lambda q, site, sent: None if site == "site-3" else sent
    with pytest.raises(RoundFailed, match=r"2 of 3 sites contributed.*silent: \['site-3'\]"):
        loop.run()


def test_no_answer_at_all_never_becomes_a_model() -> None:
    loop = Loop(bench(), rules=RoundRules(min_sites=1, retries=0))
    loop.tamper = lambda *_: None
    with pytest.raises(RoundFailed, match="0 of 3"):
        loop.run()


def updates() -> list[Update]:
    on = [Mask(torch.tensor(bits, dtype=torch.bool)) for bits in ([1, 1, 0], [0, 1, 0])]
    return [
        Contribution("a", Patch(torch.tensor([1.0, 2.0]), on[0]), "weights", 1),
        Contribution("b", Patch(torch.tensor([6.0]), on[1]), "weights", 3),
    ]


def test_a_sum_counts_absent_entries_as_zero_and_a_count_average_does_not() -> None:
    assert weighted_sum(updates(), weigh_by_examples).tolist() == [0.25, 5.0, 0.0]
    assert weighted_sum(updates(), weigh_equally).tolist() == [0.5, 4.0, 0.0]
    assert average_over_owners(updates(), weigh_by_examples, torch.full((3,), 9.0)).tolist() == [1.0, 5.0, 9.0]


def test_arrival_order_does_not_show() -> None:
    draw = torch.Generator().manual_seed(1)
    on = Mask.full(1000)
    parts = [Contribution(f"s{n}", Patch(torch.randn(1000, generator=draw), on), "weights", n) for n in range(1, 9)]
    digests = {
        compute_digest(weighted_sum([parts[i] for i in torch.randperm(8).tolist()], weigh_by_examples))
        for _ in range(50)
    }
    assert len(digests) == 1


def test_a_sum_needs_one_update_a_site() -> None:
    with pytest.raises(ValueError, match="one update of each site"):
        weighted_sum([], weigh_equally)
    with pytest.raises(ValueError, match="one update of each site"):
        weighted_sum([updates()[0], updates()[0]], weigh_equally)


def test_equal_updates_average_to_themselves() -> None:
    values = torch.randn(50)
    parts = [Contribution(f"s{n}", Patch(values, Mask.full(50)), "weights", n) for n in (1, 5, 7)]
    assert torch.allclose(weighted_sum(parts, weigh_by_examples), values)


@pytest.mark.parametrize("values", ["bfloat16", "float16"])
def test_short_formats_halve_the_bytes_and_end_near_float32(values: str) -> None:
    made = bench()
    exact, dense = run_locally(made.method("fedavg"), made.weights, made.sites(), made.task.metric)
    short, half = run_locally(
        made.method("fedavg"), made.weights, made.sites(), made.task.metric, values=values  # type: ignore[arg-type]
    )  # fmt: skip
    assert {line.values for line in half.lines if line.scalars_sent} == {values}
    assert 2 * max(line.payload_bytes for line in half.lines) <= max(line.payload_bytes for line in dense.lines) + 144
    assert torch.allclose(short.weights, exact.weights, atol=0.05)


def test_a_quorum_by_weight_is_asked_again_and_then_stops_the_run() -> None:
    """site-1 and site-2 have 56 of 96 examples."""
    loop = Loop(bench(), rules=RoundRules(min_weight=0.6, retries=1))
    loop.tamper = lambda q, site, sent: None if site == "site-3" and q == 2 else sent
    assert loop.run().rounds[1].attempts == 2
    loop = Loop(bench(), rules=RoundRules(min_weight=0.6, retries=1))
    loop.tamper = lambda q, site, sent: None if site == "site-3" and q > 1 else sent
    with pytest.raises(RoundFailed, match="with 60% of the examples"):
        loop.run()
    assert [record.sites_contributed for record in loop.federation._records] == [["site-1", "site-2", "site-3"]]


def test_an_absent_site_rests_and_every_round_balances() -> None:
    loop = Loop(bench(), rules=RoundRules(quarantine_after=2), rounds=8)
    loop.tamper = lambda q, site, sent: None if site == "site-3" and q < 6 else sent
    rounds = loop.run().rounds
    assert all(record.is_balanced for record in rounds)
    assert [record.timed_out for record in rounds[:4]] == [["site-3"], ["site-3"], [], ["site-3"]]
    assert [record.quarantined for record in rounds] == [[], [], ["site-3"], [], ["site-3"], ["site-3"], [], [], []]
    assert rounds[6].sites_contributed == ["site-1", "site-2", "site-3"]


def test_a_round_in_which_everybody_fails_leaves_the_model_as_it_was_and_is_asked_again() -> None:
    loop = Loop(bench())
    loop.tamper = lambda q, site, sent: [sent[0][:-8], *sent[1:]] if q == 2 else sent
    outcome = loop.run()
    assert outcome.rounds[1].attempts == 2
    assert compute_digest(outcome.weights) == compute_digest(Loop(bench()).run().weights)


def test_fifty_orders_of_arrival_end_in_one_model() -> None:
    """Eight sites; a sum in the order of arrival would end in many."""
    import random

    digests = set()
    for order in range(50):
        loop = Loop(bench(), "fedavg", rounds=1)
        sites = loop.bench.sites(8)
        loop.endpoints = {n: SiteEndpoint(site, loop.method, RUN, "float32") for n, site in sites.items()}
        names = list(loop.endpoints)
        random.Random(order).shuffle(names)
        loop.endpoints = {name: loop.endpoints[name] for name in names}
        carry = loop.carry
        shuffled = lambda question, names=names, carry=carry: carry(  # noqa: E731
            type(question)(question.sequence, question.kind, question.round, {n: question.messages[n] for n in names})
        )
        outcome = loop.federation.run(loop.bench.weights, lambda names=names: names, shuffled)
        digests.add(compute_digest(outcome.weights))
    assert len(digests) == 1


def test_a_commit_that_cannot_be_written_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full in round 2: the run stops, round 2 is announced to nobody, and round 1 can be gone on from."""
    announced: list[int] = []
    loop = Loop(bench())
    store = Store(tmp_path / "server", {})
    save = store.save

    def full(number: int, content: Any) -> None:
        if number == 2:
            raise CheckpointError("no space left on device")
        save(number, content)

    monkeypatch.setattr(store, "save", full)
    loop.federation.store, loop.federation.on_round = store, lambda record: announced.append(record.round)
    with pytest.raises(CheckpointError):
        loop.run()
    assert announced == [1]
    monkeypatch.undo()
    again = Loop(bench())
    again.federation.store = store
    outcome = again.federation.run(again.bench.weights, lambda: sorted(again.endpoints), again.carry, resume=True)
    assert compute_digest(outcome.weights) == compute_digest(Loop(bench()).run().weights)
